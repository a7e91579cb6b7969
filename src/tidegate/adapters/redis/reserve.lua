-- Keep or end reservations. The rule is `claim` in tidegate/core/reservations.py; the contract suite of origins runs on both.
--
-- KEYS: for each claim the subject's holds, the cell, and the mark that the reservation has ended.
-- ARGV: holds_max; then for each claim holder, amount, life_ms, 1 if it is the end, expires_at_ms of the cell.
-- Answers: for each claim its state and the cell's total.
local GONE, HELD, ENDED, ENDED_BEFORE = 0, 1, 2, 3

local function field(key, name)
  return fields(key, name)[1]
end

local HOLDS_MAX = number(ARGV[1])
local answers = {}
for i = 0, #KEYS / 3 - 1 do
  local holds_key, cell_key, ended_key = KEYS[3 * i + 1], KEYS[3 * i + 2], KEYS[3 * i + 3]
  local holder, amount, life = ARGV[5 * i + 2], number(ARGV[5 * i + 3]), number(ARGV[5 * i + 4])
  local is_final, cell_expires = ARGV[5 * i + 5] == '1', ARGV[5 * i + 6]
  local found = field(cell_key, '')
  local total = number(found) or 0
  local state = GONE
  if call('EXISTS', ended_key) == 1 then
    state = ENDED_BEFORE
  else
    local held = field(holds_key, holder)
    local sent, spare, expires
    if held and #held >= HOLD_BYTES then
      local firm, firm_until, quota
      sent, spare, firm, firm_until, quota, expires = unpack(HOLD, held)
    end
    if expires and expires > now then
      if is_final then
        call('HDEL', holds_key, holder)
        call('SET', ended_key, '', 'PX', format('%.0f', life))
        if amount > 0 then
          total = min(total + amount, TOTAL_MAX)
          local settled = min((number(field(cell_key, '+')) or 0) + amount, TOTAL_MAX)
          call('HSET', cell_key, '+', format('%.0f', settled), '', format('%.0f', total))
          if not found then call('PEXPIREAT', cell_key, cell_expires) end
        end
        state = ENDED
      elseif spare < amount or call('HLEN', holds_key) > HOLDS_MAX then
        call('HDEL', holds_key, holder)
      else
        local until_ms = min(now + life, EXACT)
        call('HSET', holds_key, holder, pack(HOLD, sent, amount, amount, until_ms, EXACT, until_ms, NEVER))
        local left = call('PTTL', holds_key)
        if left < 0 or now + left < until_ms then call('PEXPIREAT', holds_key, format('%.0f', until_ms)) end
        state = HELD
      end
    end
  end
  answers[2 * i + 1] = state
  answers[2 * i + 2] = total
end
return answers
