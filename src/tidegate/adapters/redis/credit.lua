-- Answer messages about subjects: merge what writers report, and grant credit. The rule is `grant` in
-- tidegate/core/grants.py, step by step and under the same names; a property test holds the two equal.
--
-- A cell is a hash as merge.lua writes it: one field for each node, '' for the sum; '!foreign' and '!published' are as
-- share.lua writes them, '!id', '!base' and '!returned' those of `CellRecord`. A node's field is its component, with
-- '~life' after it once the node has evicted the subject and counted it again. A subject's holds are a hash beside its
-- cells: one field for each writer, seven numbers, and '' for when holders were last asked to give back. All keys of a
-- call are in one slot.
--
-- KEYS: for each message the holds, the cell after the current one, then the message's cells, current and previous first.
-- ARGV: margin_ms, firm_ms, unanswered_ms, recall_gap_ms, quiet_ms, share, publish_ms, publish_pace_ms, the
--   channels' prefix, the messages, then each writer that they name. The messages are little-endian doubles, one after
--   the other: for each message which writer (1 is the first), number, duration_ms, quota, elapsed_ms, want, held,
--   life_ms, floor, step, joint, epoch, alone_at_ms, count of cells, count of runs; for each cell own, known, foreign, acked, sent, published,
--   total, id, expires_at_ms; for each run elapsed_ms, cost, requests.
-- Answers: the server's time in ms; then for each message granted (-1: overtaken by a later one), spare, firm, stuck,
--   stuck_ms, following; for each of its cells total, the writer's component before, foreign, regions, published, due, id,
--   base.
local MARGIN, FIRM, UNANSWERED, GAP, QUIET, SHARE, PUBLISH, PACE =
  number(ARGV[1]), number(ARGV[2]), number(ARGV[3]), number(ARGV[4]), number(ARGV[5]), number(ARGV[6]), number(ARGV[7]),
  number(ARGV[8])
local CHANNEL, MESSAGES, WRITERS = ARGV[9], ARGV[10], 10
local MESSAGE, CELL, RUN, RUN_BYTES = '<ddddddddddddddd', '<ddddddddd', '<ddd', 24

local answers = { now }
local slot = 1
local function answer(value)
  slot = slot + 1
  answers[slot] = value
end

local key_at, at = 0, 1
local place, writer, node, lived
while key_at < #KEYS do
  local holds_key, next_key = KEYS[key_at + 1], KEYS[key_at + 2]
  local given, message, duration, quota, elapsed, want, held, life, floor, step, joint, epoch, alone_at, cells, runs
  given, message, duration, quota, elapsed, want, held, life, floor, step, joint, epoch, alone_at, cells, runs, at =
    unpack(MESSAGE, MESSAGES, at)
  if given ~= place then
    place, writer = given, ARGV[WRITERS + given]
    node, lived = match(writer, '^([^~]*)~?(.*)$')
  end

  -- merge
  local totals, befores, foreigns, counted = {}, {}, {}, {}
  local regions, publisheds, dues, ids, bases = {}, {}, {}, {}, {}
  local is_late = alone_at > 0 and alone_at <= now
  for i = 1, cells do
    local key = KEYS[key_at + 2 + i]
    local own, known, foreign, acked, sent, published_own, known_total, id, expires
    own, known, foreign, acked, sent, published_own, known_total, id, expires, at = unpack(CELL, MESSAGES, at)
    local found = fields(key, node, '', '!foreign', '!published', '!id', '!base', '!returned')
    local before, total, found_id = 0, number(found[2]) or 0, number(found[5]) or 0
    local base, returned = number(found[6]) or 0, number(found[7]) or 0
    local base_before, returned_before, total_before = base, returned, total
    local component
    -- adopt
    if found[1] then
      local held_life = ''
      before = number(found[1])
      if not before then
        local held_own
        held_own, held_life = match(found[1], '^([^~]*)~?(.*)$')
        before = number(held_own) or 0
      end
      if held_life ~= lived then
        if (number(held_life) or 0) > (number(lived) or 0) then before = NEVER else before, component = 0, 0 end
      end
    end
    if found_id == 0 and (own > 0 or known > 0 or total > 0) then
      found_id = max(now, id + 1)
      call('HSET', key, '!id', format('%.0f', found_id))
    end
    if before == NEVER then
      before = own
    else
      -- merge_part
      local lost
      if found_id > 0 and id >= found_id and (id > found_id or before < acked or total < known_total) then
        found_id, returned = max(now, id + 1), total - base
        call('HSET', key, '!id', format('%.0f', found_id))
      end
      if id < found_id then
        local missing = known_total - base - returned
        if missing > 0 then base, total = base + missing, total + missing end
        lost = min(max(sent, published_own), own) - before
      else
        lost = min(min(published_own, own) - before, base)
      end
      if is_late then lost = max(lost, min(own - before, base)) end
      if lost > 0 then
        local part = min(lost, base)
        base, returned, total = base - part, returned + lost, total - part
      end
      if own > before then component, total = own, min(total + own - before, TOTAL_MAX) end
      if known > total then base, total = base + known - total, known end
      if component then
        local text = format('%.0f', component)
        if lived ~= '' then text = text .. '~' .. lived end
        call('HSET', key, node, text, '', format('%.0f', total))
      elseif total ~= total_before then
        call('HSET', key, '', format('%.0f', total))
      end
      if base ~= base_before or returned ~= returned_before then
        call('HSET', key, '!base', format('%.0f', base), '!returned', format('%.0f', returned))
      end
      -- The cell and its expiry come into being together; the same cell always has the same expiry.
      if not found[2] and total > 0 then call('PEXPIREAT', key, format('%.0f', expires)) end
    end
    totals[i], befores[i], foreigns[i], ids[i] = total, before, max(foreign, number(found[3]) or 0), found_id
    counted[i], bases[i] = max(total, known) + foreigns[i], base

    -- Mark.assign
    local published, assigned, until_ms, mark_epoch, others, owner = 0, 0, 0, 0, 0, ''
    if found[4] and #found[4] >= MARK_BYTES then
      published, assigned, until_ms, mark_epoch, others = unpack(MARK, found[4])
      owner = string.sub(found[4], MARK_BYTES + 1)
    end
    if epoch > mark_epoch then published, assigned, until_ms, mark_epoch = 0, 0, 0, epoch end
    regions[i], publisheds[i], dues[i] = others, published, 0
    if floor > 0 and total > published and total >= (foreigns[i] == 0 and floor or 1) then
      local is_live = now < until_ms and until_ms <= now + PUBLISH
      local is_another = is_live and owner ~= node and now < until_ms - PUBLISH + PACE
      local is_busy = is_live and assigned > published
      local sent_out = is_busy and assigned or published
      local is_pressed = (sent_out == 0 or (step > 0 and total >= sent_out + step)) and not is_another
      if is_busy and not is_pressed then
        if owner == node then dues[i] = 1 end
      else
        call('HSET', key, '!published', pack(MARK, published, total, now + PUBLISH, mark_epoch, others) .. node)
        dues[i] = is_pressed and 2 or 1
      end
    end
  end

  -- drop_expired, others_of
  local flat = pcall('HGETALL', holds_key)
  if flat.err then
    call('DEL', holds_key)
    flat = {}
  end
  local spare, firm, stuck, stuck_until, count, quota_min = 0, 0, 0, NEVER, 0, quota
  local recalled_at, latest = NEVER, 0
  local own_number, own_spare
  local names, values = {}, {}  -- of others that hold something
  for i = 1, #flat, 2 do
    local name, value = flat[i], flat[i + 1]
    if name == '' then
      if #value >= 8 then recalled_at = unpack('<d', value) end
    elseif #value < HOLD_BYTES then
      call('HDEL', holds_key, name)
    else
      local n, s, f, firm_until, q, expires, recalled = unpack(HOLD, value)
      if expires <= now then
        call('HDEL', holds_key, name)
      elseif name == writer then
        own_number, own_spare = n, s
      else
        count = count + 1
        latest = max(latest, expires)
        if s > 0 then
          spare = spare + s
          quota_min = min(quota_min, q)
          local promised = 0
          if firm_until > now then promised = min(f, s) end
          if recalled ~= NEVER and now - recalled >= UNANSWERED then
            stuck = stuck + s
            if stuck_until == NEVER or expires < stuck_until then stuck_until = expires end
          else
            firm = firm + promised
          end
          if s > promised then
            names[#names + 1] = name
            values[#values + 1] = value
          end
        end
      end
    end
  end

  local granted
  local following = 0
  if own_number and message <= own_number then
    granted = NEVER
    if message == own_number then granted = own_spare end
    at = at + RUN_BYTES * runs
  else
    -- usage
    local previous = counted[2]
    local used = counted[1] + carried(previous, elapsed, duration)
    local later = fields(next_key, '', '!foreign')
    following = (number(later[1]) or 0) + (number(later[2]) or 0)
    if following > 0 and following + counted[1] > used then
      used, previous = following + counted[1], 0
    end
    local room = quota_min - used - spare

    -- grant_runs
    local promised, refused = 0, 0
    for _ = 1, runs do
      local then_elapsed, cost, requests
      then_elapsed, cost, requests, at = unpack(RUN, MESSAGES, at)
      local free = room - promised
      if previous > 0 then
        free = free - (carried(previous, then_elapsed, duration) - carried(previous, elapsed, duration))
      end
      local fits = 0
      if free > 0 then fits = quotient(free, cost) end
      if fits >= requests then
        fits = requests
      elseif refused == 0 or cost < refused then
        refused = cost
      end
      promised = promised + fits * cost
    end

    granted = max(promised, held)
    local since = now - recalled_at
    if refused == 0 then
      local left = room - granted
      if left > 0 and not (recalled_at ~= NEVER and since >= 0 and since < QUIET) then
        local part = left
        if count > 0 then part = quotient(left, SHARE) end
        granted = max(granted, promised + min(want, part))
      end
    elseif used + firm + promised + refused <= quota and spare > firm
      and not (recalled_at ~= NEVER and since >= 0 and since < GAP) then
      -- recall
      call('HSET', holds_key, '', pack('<d', now))
      local digest = string.sub(holds_key, -18, -3)
      for i = 1, #names do
        local n, s, f, firm_until, q, expires, recalled = unpack(HOLD, values[i])
        if recalled == NEVER then
          local rest = string.sub(values[i], HOLD_BYTES + 1)
          call('HSET', holds_key, names[i], pack(HOLD, n, s, f, firm_until, q, expires, now) .. rest)
        end
        -- A user that may not publish loses the push, not the answer: credit then comes back when its life ends.
        pcall('PUBLISH', CHANNEL .. match(names[i], '^[^~]*'), digest .. names[i])
      end
    end
    local expires = min(now + life + MARGIN, EXACT)
    call('HSET', holds_key, writer, pack(HOLD, message, granted, max(0, promised - joint), now + FIRM, quota, expires, NEVER))
    call('PEXPIREAT', holds_key, format('%.0f', max(latest, expires)))
  end

  answer(granted)
  answer(spare)
  answer(firm)
  answer(stuck)
  answer(stuck_until == NEVER and NEVER or stuck_until - now)
  answer(following)
  for i = 1, cells do
    answer(totals[i])
    answer(befores[i])
    answer(foreigns[i])
    answer(regions[i])
    answer(publisheds[i])
    answer(dues[i])
    answer(ids[i])
    answer(bases[i])
  end
  key_at = key_at + 2 + cells
end
return answers
