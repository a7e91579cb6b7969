-- Merge components into cells: component = max(component, own). A cell is a hash: one field for each writer, and
-- the field '' with their sum. All cells of a call are in one slot.
--
-- KEYS: the cells.  ARGV: for each of them writer ('' repeats the one before), own, expires_at_ms.
-- Answers, for each of them: the total after the merge, and the writer's component before it.
--
-- Numbers are doubles here, exact up to 2^53: no component and no expiry beyond that is sent. A total stops at 2^62,
-- because an answer has 64 bits. Numbers are written with %.0f: the ordinary conversion gives 1e+15 for a million
-- billions.
local call, pcall, number, format, min = redis.call, redis.pcall, tonumber, string.format, math.min
local answers = {}
local writer
for i = 1, #KEYS do
  local key = KEYS[i]
  local given = ARGV[3 * i - 2]
  if given ~= '' then writer = given end
  local own = ARGV[3 * i - 1]
  local held = pcall('HMGET', key, writer, '')
  if held.err then
    -- Not a hash: only Tidegate writes here, so it is damage. Nodes merge again what is lost with it.
    call('DEL', key)
    held = {}
  end
  local before, total = number(held[1]) or 0, number(held[2]) or 0
  local growth = number(own) - before
  if growth > 0 then
    total = min(total + growth, 4611686018427387904)
    call('HSET', key, writer, own, '', format('%.0f', total))
    -- The cell and its expiry come into being together; the same cell always has the same expiry.
    if not held[2] then call('PEXPIREAT', key, ARGV[3 * i]) end
  end
  answers[2 * i - 1] = total
  answers[2 * i] = before
end
return answers
