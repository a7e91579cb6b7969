-- Keep resets, by maximum, and answer those that were kept after a number. The port is `Origin.resets` in tidegate/ports.py.
--
-- KEYS: generations (a hash: subject -> generation; '' -> the last number, 'began' -> the first one); subjects by number; subjects by
-- expiry (sorted sets).
-- ARGV: since, resets in one answer at most; then for each reset subject, generation, expires_at_ms.
-- Answers: the number up to which this is complete, 1 if there are more, then subject and generation of each; only 0, 0 if resets were
-- lost after `since`.
local EXPIRED_MAX = 1000
local generations, numbers, expiries = KEYS[1], KEYS[2], KEYS[3]
for i = 1, 3 do
  local kind = call('TYPE', KEYS[i]).ok
  if kind ~= 'none' and kind ~= (i == 1 and 'hash' or 'zset') then call('DEL', KEYS[1], KEYS[2], KEYS[3]) end
end

for _, subject in ipairs(call('ZRANGEBYSCORE', expiries, '-inf', format('%.0f', now), 'LIMIT', 0, EXPIRED_MAX)) do
  call('HDEL', generations, subject)
  call('ZREM', numbers, subject)
  call('ZREM', expiries, subject)
end
local last = number(call('HGET', generations, '') or '0')
local began = number(call('HGET', generations, 'began') or '0')
local kept = false
for i = 3, #ARGV, 3 do
  local subject, generation, expires = ARGV[i], number(ARGV[i + 1]), number(ARGV[i + 2])
  if expires > now and generation > number(call('HGET', generations, subject) or '0') then
    last = max(last + 1, now)
    if began == 0 then began = last end
    call('HSET', generations, subject, ARGV[i + 1])
    call('ZADD', numbers, format('%.0f', last), subject)
    call('ZADD', expiries, ARGV[i + 2], subject)
    kept = true
  end
end
if kept then
  call('HSET', generations, '', format('%.0f', last), 'began', format('%.0f', began))
  local latest = call('ZREVRANGE', expiries, 0, 0, 'WITHSCORES')[2]
  for i = 1, 3 do call('PEXPIREAT', KEYS[i], format('%.0f', number(latest))) end
end

local since, limit = number(ARGV[1]), number(ARGV[2])
if since > last or (since > 0 and since < began) then return { 0, 0 } end
local found = call('ZRANGEBYSCORE', numbers, '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, limit + 1)
local more = #found > 2 * limit
local answer = { last, more and 1 or 0 }
for i = 1, min(#found, 2 * limit), 2 do
  answer[#answer + 1] = found[i]
  answer[#answer + 1] = number(call('HGET', generations, found[i]))
  if more then answer[1] = number(found[i + 1]) end
end
return answer
