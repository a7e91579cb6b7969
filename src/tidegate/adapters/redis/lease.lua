-- Take, renew or give back the import of the region. The rule is `take_lease` in tidegate/core/sharing.py.
--
-- KEYS: the lease.  ARGV: node, life_ms; then, to keep how far the import has come, cursor, imported_at_ms, full_at_ms,
--   regions, epoch.
-- Answers: holder, since_ms, until_ms, the server's time in ms, cursor, imported_at_ms, full_at_ms, regions, epoch.
local call, pcall, number, format, fmod = redis.call, redis.pcall, tonumber, string.format, math.fmod
local clock = call('TIME')
local now = number(clock[1]) * 1000 + (number(clock[2]) - fmod(number(clock[2]), 1000)) / 1000
local STATE = { 'cursor', 'imported_at_ms', 'full_at_ms', 'regions', 'epoch' }

local key, node, life = KEYS[1], ARGV[1], number(ARGV[2])
local held = pcall('HMGET', key, 'holder', 'since_ms', 'until_ms', unpack(STATE))
if held.err then
  call('DEL', key)
  held = {}
end
local holder, since, until_ms = held[1] or '', number(held[2]) or now, number(held[3]) or 0
local state = { held[4] or '', held[5] or '-1', held[6] or '-1', held[7] or '1', held[8] or '0' }
if holder == '' or now >= until_ms or holder == node then
  local is_mine = holder == node
  if not is_mine then since = now end
  if is_mine and #ARGV > 2 then state = { ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7] } end
  if life > 0 then holder = node elseif is_mine then holder = '' end
  until_ms = now + life
  call('HSET', key, 'holder', holder, 'since_ms', format('%.0f', since), 'until_ms', format('%.0f', until_ms),
    'cursor', state[1], 'imported_at_ms', state[2], 'full_at_ms', state[3], 'regions', state[4], 'epoch', state[5])
end
return { holder, since, until_ms, now, state[1], number(state[2]), number(state[3]), number(state[4]), number(state[5]) }
