-- Keep what the ledger holds of cells, and say who publishes. The rule is `share` in tidegate/core/grants.py, step by
-- step and under the same names; a property test holds the two equal.
--
-- Fields of a cell: '!foreign:region' for what another region has published, '!at:region' for when that was learned,
-- '!foreign' for their sum, '!published' for what this region has published and who publishes the rest. Holds are as
-- credit.lua writes them. All keys of a call are in one slot.
--
-- KEYS: for each share the holds, the cell before, the cell, the cell after.
-- ARGV: recall_gap_ms, publish_ms, publish_pace_ms, the channels' prefix; then for each share region ('' for this one),
--   count, owner, epoch, duration_ms, sequence, expires_at_ms.
-- Answers, for each share: total, foreign, published, due.
local GAP, PUBLISH, PACE, CHANNEL = number(ARGV[1]), number(ARGV[2]), number(ARGV[3]), ARGV[4]

local function count_of(key)
  local found = fields(key, '', '!foreign')
  return (number(found[1]) or 0) + (number(found[2]) or 0)
end

local function recall_overdrawn(holds_key, before_key, key, after_key, duration, sequence)
  local running = quotient(now, duration)
  local used
  if running == sequence then
    used = count_of(key) + carried(count_of(before_key), now - running * duration, duration)
  elseif running == sequence + 1 then
    used = count_of(after_key) + carried(count_of(key), now - running * duration, duration)
  else
    return
  end
  local flat = pcall('HGETALL', holds_key)
  if flat.err then return end
  local spare, quota, recalled_at = 0, NEVER, NEVER
  local names, values = {}, {}
  for i = 1, #flat, 2 do
    local name, value = flat[i], flat[i + 1]
    if name == '' then
      if #value >= 8 then recalled_at = unpack('<d', value) end
    elseif #value >= HOLD_BYTES then
      local _, s, f, firm_until, q, expires = unpack(HOLD, value)
      if expires > now and s > 0 then
        spare = spare + s
        if quota == NEVER or q < quota then quota = q end
        local promised = 0
        if firm_until > now then promised = f end
        if s > promised then
          names[#names + 1] = name
          values[#values + 1] = value
        end
      end
    end
  end
  local since = now - recalled_at
  if spare == 0 or used + spare <= quota or (recalled_at ~= NEVER and since >= 0 and since < GAP) then return end
  -- recall
  call('HSET', holds_key, '', pack('<d', now))
  local digest = string.sub(holds_key, -18, -3)
  for i = 1, #names do
    local n, s, f, firm_until, q, expires, recalled = unpack(HOLD, values[i])
    if recalled == NEVER then
      local rest = string.sub(values[i], HOLD_BYTES + 1)
      call('HSET', holds_key, names[i], pack(HOLD, n, s, f, firm_until, q, expires, now) .. rest)
    end
    pcall('PUBLISH', CHANNEL .. string.match(names[i], '^[^~]*'), digest .. names[i])
  end
end

local answers = {}
for i = 1, #KEYS / 4 do
  local holds_key, before_key, key, after_key = KEYS[4 * i - 3], KEYS[4 * i - 2], KEYS[4 * i - 1], KEYS[4 * i]
  local at = 4 + 7 * (i - 1)
  local region, count, caller, epoch = ARGV[at + 1], number(ARGV[at + 2]), ARGV[at + 3], number(ARGV[at + 4])
  local duration, sequence, expires = number(ARGV[at + 5]), number(ARGV[at + 6]), ARGV[at + 7]

  local found = fields(key, '', '!foreign', '!published', '!foreign:' .. region)
  local is_new = not (found[1] or found[2] or found[3])
  local total, foreign = number(found[1]) or 0, number(found[2]) or 0
  local published, assigned, until_ms, mark_epoch, regions, owner = 0, 0, 0, 0, 0, ''
  if found[3] and #found[3] >= MARK_BYTES then
    published, assigned, until_ms, mark_epoch, regions = unpack(MARK, found[3])
    owner = string.sub(found[3], MARK_BYTES + 1)
  end
  if epoch > mark_epoch then published, assigned, until_ms, mark_epoch, owner = 0, 0, 0, epoch, '' end
  local has_grown = false
  if region ~= '' then
    local known = number(found[4]) or 0
    if count > known then
      if not found[4] then regions = regions + 1 end
      foreign = min(foreign + count - known, EXACT)
      call('HSET', key, '!foreign:' .. region, format('%.0f', count), '!at:' .. region, format('%.0f', now),
        '!foreign', format('%.0f', foreign))
      has_grown = true
    end
  else
    if epoch == mark_epoch then published = max(published, count) end
  end

  -- Mark.assign, without a step
  local due = 0
  if (foreign > 0 or region == '') and total > published then
    local is_live = now < until_ms and until_ms <= now + PUBLISH
    local is_another = is_live and owner ~= caller and now < until_ms - PUBLISH + PACE
    local is_busy = is_live and assigned > published
    if not is_busy or owner == caller then
      due = not is_busy and published == 0 and not is_another and 2 or 1
      assigned, until_ms, owner = total, now + PUBLISH, caller
    end
  end
  local mark = pack(MARK, published, assigned, until_ms, mark_epoch, regions) .. owner
  if mark ~= found[3] and not (is_new and count == 0) then
    call('HSET', key, '!published', mark)
    if is_new then call('PEXPIREAT', key, expires) end
  end
  if has_grown then recall_overdrawn(holds_key, before_key, key, after_key, duration, sequence) end
  answers[4 * i - 3], answers[4 * i - 2], answers[4 * i - 1], answers[4 * i] = total, foreign, published, due
end
return answers
