-- What credit.lua, share.lua, reserve.lua and resets.lua have in common: scripts.py puts it in front of each.
--
-- Numbers are doubles, exact up to 2^53: none beyond that is sent.
local call, pcall, number, format, fmod = redis.call, redis.pcall, tonumber, string.format, math.fmod
local min, max, ceil, match = math.min, math.max, math.ceil, string.match
local pack, unpack = struct.pack, struct.unpack
local EXACT, TOTAL_MAX, NEVER = 9007199254740992, 4611686018427387904, -1
-- A hold: number, spare, firm, firm_until_ms, quota, expires_at_ms, recalled_at_ms. A later version may append.
local HOLD, HOLD_BYTES = '<ddddddd', 56
-- A mark: published, assigned, until_ms, epoch, regions; then the node that is responsible.
local MARK, MARK_BYTES = '<ddddd', 40

local clock = call('TIME')
local now = number(clock[1]) * 1000 + (number(clock[2]) - fmod(number(clock[2]), 1000)) / 1000

local function quotient(a, b)  -- of whole numbers, a not negative
  return (a - fmod(a, b)) / b
end

local function carried(previous, elapsed, duration)
  local weight = previous * (duration - elapsed)
  if weight < EXACT then return quotient(weight, duration) end
  -- The product is not exact any more. Rounded up, which grants less.
  return min(previous, ceil(previous * ((duration - elapsed) / duration) * (1 + 2 ^ -50)) + 1)
end

local function fields(key, ...)
  local held = pcall('HMGET', key, ...)
  if held.err then
    -- Not a hash: nothing else writes here, so it is damage. Nodes report again what is lost with it.
    call('DEL', key)
    return {}
  end
  return held
end

