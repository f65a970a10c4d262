// Where the chip time went.

import { byId, compact, html, percent, put, say, stack } from "./format.js";

const CAUSES = {
  useful: ["in the global model"],
  start_up: ["start-up", "a first incarnation begins"],
  compile: ["compiling", "programs are made or loaded"],
  down: ["down", "dead, not yet started again"],
  rejoin: ["rejoining", "a later incarnation begins"],
  blocked: ["waiting for shards", "lock-step only"],
  data: ["waiting for data", "a step's batch was not there yet"],
  stalled: ["standing still", "in the middle of its work"],
  discarded: ["work lost", "steps that never reached the global model"],
  rejected: ["work rejected", "steps of pushes that were rejected"],
  pending: ["work not merged yet", "steps that may still be merged"],
  save: ["snapshots", "copies of the state"],
  other: ["between steps", "copies, applies, waits for a processor"],
};

export function goodput(account) {
  const box = byId("goodput");
  if (!account) {
    say("goodput-says", "not known yet");
    return box.replaceChildren();
  }
  const lost = Object.entries(account.lost_time)
    .filter(([, share]) => share >= 0.0005)
    .sort((a, b) => b[1] - a[1]);
  const [worst] = lost;
  say(
    "goodput-says",
    `${percent(account.goodput, 1)} of ${compact(account.chip_seconds)} chip-seconds are in the global model` +
      (worst ? `; most of the rest: ${CAUSES[worst[0]][0]}` : ""),
  );
  const shares = [["useful", account.goodput ?? 0], ...lost];
  const said = shares.map(([cause, share]) => `${CAUSES[cause][0]} ${percent(share, 1)}`);
  const parts = shares.map(([cause, share]) => [
    `${CAUSES[cause][0]}: ${percent(share, 1)}`,
    share,
    { "data-cause": cause },
  ]);
  const list = shares.map(([cause, share]) =>
    html(
      "li",
      { "data-cause": cause, title: CAUSES[cause][1] },
      html("i"),
      CAUSES[cause][0],
      html("b", null, percent(share, 1)),
    ),
  );
  put(
    box,
    stack({ class: "stack", "aria-label": said.join(", ") }, parts),
    html("ul", { class: "causes" }, list),
  );
}
