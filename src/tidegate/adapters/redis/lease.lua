-- Take, renew or give back the import of the region. The rule is `take_lease` in tidegate/core/sharing.py.
--
-- KEYS: the lease.  ARGV: node, life_ms, has_lost; then, to keep how far the import has come, cursor, imported_at_ms, full_at_ms,
--   regions, epoch, lag_ms, and when the lease began under which this is known.
-- Answers: holder, since_ms, until_ms, the server's time in ms, lost_at_ms, cursor, imported_at_ms, full_at_ms, regions, epoch,
--   lag_ms.
local call, pcall, number, format, fmod = redis.call, redis.pcall, tonumber, string.format, math.fmod
local clock = call('TIME')
local now = number(clock[1]) * 1000 + (number(clock[2]) - fmod(number(clock[2]), 1000)) / 1000
local STATE = { 'cursor', 'imported_at_ms', 'full_at_ms', 'regions', 'epoch', 'lag_ms' }

local key, node, life = KEYS[1], ARGV[1], number(ARGV[2])
local held = pcall('HMGET', key, 'holder', 'since_ms', 'until_ms', 'lost_at_ms', unpack(STATE))
if held.err then
  call('DEL', key)
  held = {}
end
local holder, since, until_ms = held[1] or '', number(held[2]) or now, number(held[3]) or 0
local lost_at = held[4] or '-1'
if ARGV[3] == '1' then
  lost_at = format('%.0f', now)
  call('HSET', key, 'lost_at_ms', lost_at)
end
local state = { held[5] or '', held[6] or '-1', held[7] or '-1', held[8] or '1', held[9] or '0', held[10] or '-1' }
local is_mine = holder == node
if is_mine or (life > 0 and (holder == '' or now >= until_ms)) then
  if not is_mine then since = now end
  if is_mine and #ARGV > 3 and number(ARGV[10]) == since then
    state = { ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9] }
  end
  holder = life > 0 and node or ''
  until_ms = now + life
  call('HSET', key, 'holder', holder, 'since_ms', format('%.0f', since), 'until_ms', format('%.0f', until_ms),
    'cursor', state[1], 'imported_at_ms', state[2], 'full_at_ms', state[3], 'regions', state[4], 'epoch', state[5],
    'lag_ms', state[6])
end
return {
  holder, since, until_ms, now, number(lost_at),
  state[1], number(state[2]), number(state[3]), number(state[4]), number(state[5]), number(state[6])
}
