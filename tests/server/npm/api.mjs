// Drives @unkey/api against a running server and prints what it saw, as JSON.
import { Unkey } from "@unkey/api";

const unkey = new Unkey({ rootKey: process.env.KEY, serverURL: process.env.URL });
const seen = {};
const item = { namespace: "email", identifier: "u", limit: 2, duration: 2592000000 };

const answers = [];
for (let i = 0; i < 3; i++) answers.push((await unkey.ratelimit.limit(item)).data);
seen.limit = answers.map((a) => [a.success, a.limit, a.remaining, a.overrideId ?? "absent"]);
seen.reset = answers[0].reset % 2592000000;

const batch = await unkey.ratelimit.multiLimit([
  { ...item, identifier: "a" },
  { ...item, identifier: "b", cost: 3 },
]);
seen.multi = [batch.data.passed, batch.data.limits.map((l) => [l.namespace, l.identifier, l.remaining, l.passed])];

const created = await unkey.ratelimit.setOverride({ ...item, identifier: "vip_*", limit: 50 });
const found = await unkey.ratelimit.getOverride({ namespace: "email", identifier: "vip_7" });
seen.override = [found.data.overrideId === created.data.overrideId, found.data.identifier, found.data.limit, found.data.duration];
seen.limited = (await unkey.ratelimit.limit({ ...item, identifier: "vip_7" })).data.overrideId === created.data.overrideId;

for (let i = 0; i < 12; i++) await unkey.ratelimit.setOverride({ ...item, identifier: `user_${i}` });
let listed = 0;
let pages = 0;
for await (const page of await unkey.ratelimit.listOverrides({ namespace: "email" })) {
  pages++;
  listed += page.result.data.length;
}
seen.pages = [pages, listed];

seen.deleted = Object.keys((await unkey.ratelimit.deleteOverride({ namespace: "email", identifier: "vip_*" })).data).length;

async function failure(call) {
  try {
    await call();
    return "no error";
  } catch (error) {
    return [error.constructor.name, error.statusCode, error.error?.type?.split("/errors/")[1] ?? "no type"];
  }
}
seen.errors = {
  notFound: await failure(() => unkey.ratelimit.getOverride({ namespace: "email", identifier: "vip_7" })),
  invalid: await failure(() => unkey.ratelimit.limit({ ...item, limit: 0 })),
  unauthorized: await failure(() => new Unkey({ rootKey: "tg_wrong", serverURL: process.env.URL }).ratelimit.limit(item)),
  quota: await failure(async () => {
    const poor = new Unkey({ rootKey: process.env.POOR_KEY, serverURL: process.env.URL });
    await poor.ratelimit.limit(item);
    await poor.ratelimit.limit(item);
  }),
};
console.log(JSON.stringify(seen));
