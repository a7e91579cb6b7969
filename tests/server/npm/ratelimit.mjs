// Drives @unkey/ratelimit against a running server and prints what it saw, as JSON.
import { Overrides, Ratelimit } from "@unkey/ratelimit";

const options = { rootKey: process.env.KEY, baseUrl: process.env.URL };
const ratelimit = new Ratelimit({ ...options, namespace: "email.ratelimit", limit: 2, duration: 2592000000 });
const seen = {};

const answers = [];
for (let i = 0; i < 4; i++) answers.push(await ratelimit.limit("u"));
seen.limit = answers.map((a) => [a.success, a.limit, a.remaining]);
seen.cost = (await ratelimit.limit("costly", { cost: 2 })).remaining;

const overrides = new Overrides(options);
const created = await overrides.setOverride({ namespace: "email.ratelimit", identifier: "vip", limit: 9, duration: 2592000000 });
const found = await overrides.getOverride({ namespace: "email.ratelimit", identifier: "vip" });
seen.override = [found.data.overrideId === created.data.overrideId, found.data.limit];
seen.overridden = (await ratelimit.limit("vip")).limit;
const page = await overrides.listOverrides({ namespace: "email.ratelimit" });
seen.listed = [page.result?.data?.length ?? page.data.length];
await overrides.deleteOverride({ namespace: "email.ratelimit", identifier: "vip" });
try {
  await overrides.getOverride({ namespace: "email.ratelimit", identifier: "vip" });
  seen.gone = "still there";
} catch (error) {
  seen.gone = error.constructor.name;
}
const wrong = new Ratelimit({ ...options, rootKey: "tg_wrong", namespace: "email.ratelimit", limit: 2, duration: 2592000000, onError: (error) => ({ success: true, limit: 0, remaining: 0, reset: 0, fallback: error instanceof Error }) });
seen.fallback = (await wrong.limit("u")).fallback;
console.log(JSON.stringify(seen));
