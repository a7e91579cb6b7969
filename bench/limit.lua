-- wrk -s limit.lua URL -- KEY PATH FILE: posts the lines of FILE in turn (for /v1/check: asks with them as queries);
-- prints one line of figures at the end.
local requests = {}
local position = 0

function init(args)
  local headers = { ["Authorization"] = "Bearer " .. args[1], ["Content-Type"] = "application/json" }
  for line in io.lines(args[3]) do
    if args[2] == "/v1/check" then
      requests[#requests + 1] = wrk.format("GET", args[2] .. "?" .. line, headers)
    else
      requests[#requests + 1] = wrk.format("POST", args[2], headers, line)
    end
  end
end

function request()
  position = position % #requests + 1
  return requests[position]
end

function done(summary, latency, _)
  local e = summary.errors
  io.write(string.format("FIGURES %d %d %d %.3f %.3f\n", summary.requests, summary.duration,
    e.connect + e.read + e.write + e.status + e.timeout, latency:percentile(50) / 1000, latency:percentile(99) / 1000))
end
