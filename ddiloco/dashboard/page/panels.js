// Every panel but the chart: figures, waiting, goodput, versions, participation, links, log events.

import {
  DASH,
  byId,
  bytes,
  clockTime,
  compact,
  cosine,
  html,
  join,
  loss,
  mean,
  meter,
  numbered,
  percent,
  plural,
  put,
  say,
  sum,
  table,
} from "./format.js";
import { goodput } from "./goodput.js";
import { rejoins } from "./rejoins.js";

const known = (values) => values.filter((value) => value !== null);
const islandName = (island) =>
  html(
    "span",
    { class: "island", "--colour": island.colour },
    html("span", { class: "swatch" }),
    `island ${island.number}`,
  );

export function drawPanels(status) {
  figures(status);
  overTime(status);
  waiting(status);
  goodput(status.goodput);
  rejoins(status);
  versions(status);
  participation(status);
  links(status);
  logEvents(status);
}

/** Whether nothing goes on any more, as far as is known: what is said is of the end of the log. */
const still = ({ phase }) => phase === "over" || phase === "silent";

const since = (status) => (still(status) ? "before the end" : "ago");
const passed = (status, at) => clockTime(status.seconds - at);
const age = (status, at) => `${passed(status, at)} ${since(status)}`;

// Islands that have left count no more, until the run is over and all have.
function present({ phase, islands }) {
  return islands.filter((island) => phase === "over" || island.state !== "left");
}

function figures(status) {
  const { links, outer_gradients: found } = status;
  const islands = present(status);
  const over = status.phase === "over";
  const share = percent(mean(known(islands.map((island) => island.participation_recent))));
  const rate = sum(links.map((link) => link.sent_bytes_per_second));
  const up = islands.filter((island) => island.state === "running").length;
  const account = status.goodput ?? {};
  const again = sum(status.islands.map((island) => island.restarts));
  const ofShards = status.restarts - again ? `, of shards ${status.restarts - again}` : "";
  const restarts = plural(again, "restart") + ofShards;
  const training = percent(account.goodput_training, 1);
  const rows = [
    ["Held-out loss", loss(status.heldout_loss), heldout(status)],
    over
      ? ["Islands", String(islands.length), restarts]
      : [
          "Islands up",
          `${up} of ${islands.length}`,
          status.tokens_per_second === null ? restarts : speed(status),
        ],
    [
      "Goodput",
      percent(account.goodput, 1),
      account.goodput_training ? `${training} without start-up` : "of the chip time",
    ],
    ["Uptime", percent(account.uptime, 1), "some island trained, since the first step"],
    ["Participation", share, found.staleness === null ? "of the latest commits" : gradients(found)],
    [
      "Sent",
      bytes(sum(links.map((link) => link.sent_bytes))),
      still(status) ? plural(status.commits, "commit") : `${bytes(rate)}/s now`,
    ],
  ];
  put(
    byId("figures"),
    ...rows.map(([name, value, more]) =>
      html("div", null, html("dt", null, name), html("dd", null, value), html("dd", null, more)),
    ),
  );
}

// What the islands' pushes have in common.
function gradients(found) {
  const names = {
    agreement: "cosine of two pushes",
    rho: "cosine of successive merges",
    length: "length of a merge",
  };
  const said = Object.entries(names)
    .filter(([name]) => found[name] !== null)
    .map(([name, text]) => `${text} ${cosine(found[name])}`);
  const steps = `of the latest commits; pushes of up to ${Math.round(found.staleness)} steps`;
  return [steps, ...said].join(", ");
}

// What else the model measures, or the loss's unit; and how old that is.
function heldout(status) {
  const { heldout_measures: found, heldout_seconds: at, loss_unit } = status;
  const parts = Object.entries(found).map(
    ([name, value]) => `${name.replaceAll("_", " ")} ${loss(value)}`,
  );
  if (!parts.length && loss_unit) parts.push(loss_unit);
  if (at !== null) parts.push(age(status, at));
  return parts.join(", ");
}

function speed(status) {
  const chip = status.tokens_per_second_per_chip;
  const each = chip === null ? "" : `, ${compact(chip)} a chip`;
  const mfu = status.mfu === null ? "" : `, ${percent(status.mfu, 1)} MFU`;
  return `${compact(status.tokens_per_second)} tokens/s${each}${mfu}`;
}

const STATES = "down stalled quarantined joining running left ended unknown".split(" ");

function overTime({ phase, islands, shards, timeline }) {
  if (still({ phase })) return say("over-time-says", struck(timeline.counts));
  const parts = STATES.map((state) => {
    const numbers = islands.filter((each) => each.state === state).map((each) => each.number);
    if (!numbers.length) return "";
    if (numbers.length === islands.length)
      return `${numbers.length > 1 ? `all ${numbers.length} islands` : "its only island"}: ${state}`;
    return `${state}: ${numbers.length > 6 ? numbers.length : join(numbers)}`;
  });
  if (!islands.length) parts.push("no island has joined yet");
  for (const state of STATES) {
    const numbers = shards.filter((each) => each.state === state).map((each) => each.number);
    if (state !== "running" && numbers.length) parts.push(`${numbered(numbers, "shard")}: ${state}`);
  }
  const cut = new Map(); // by the islands that they do not hear, shards
  for (const { number, state, unheard } of shards) {
    const who = numbered(unheard);
    if (state === "running" && unheard.length) cut.set(who, [...(cut.get(who) ?? []), number]);
  }
  for (const [who, by] of cut) parts.push(`not heard by ${numbered(by, "shard")}: ${who}`);
  say("over-time-says", parts.filter(Boolean).join(" · "));
}

const STRUCK = [
  ["kill", "kill"],
  ["fault", "fault other than a kill", "faults other than kills"],
  ["exit", "crash", "crashes"],
  ["restart", "restart"],
  ["hang", "hang"],
];

function struck(counts) {
  const there = STRUCK.map(([kind, ...words]) => counts[kind] && plural(counts[kind], ...words));
  return join(there.filter(Boolean)) || "no fault, crash or restart";
}

function waiting(status) {
  say("waiting-says", status.waiting);
  const missed = status.islands.filter((island) => island.missed_reason);
  const columns = [
    ["island", islandName, "row"],
    ["why it last missed a round", (island) => island.missed_reason, "text"],
    [since(status), ({ missed_seconds: at }) => (at === null ? "now" : passed(status, at)), "muted"],
  ];
  put(byId("missed"), missed.length ? table(missed, columns) : "");
}

function versions(status) {
  const { fragments, islands, merging } = status;
  const count = fragments.length,
    box = byId("versions");
  if (!count) {
    const text = merging ? "no fragment has been committed yet" : "no island syncs in this run";
    say("versions-says", text);
    return box.replaceChildren();
  }
  const row = (name, cells) => html("tr", null, html("th", { scope: "row" }, name), cells);
  const head = html(
    "tr",
    null,
    html("th", { scope: "col" }, html("span", { class: "muted" }, "fragment")),
    fragments.map((_, p) => html("th", { scope: "col" }, String(p))),
  );
  const top = row(
    "global model",
    fragments.map((version) => html("td", { class: "global" }, String(version ?? DASH))),
  );
  const rows = islands.map((island) =>
    row(
      islandName(island),
      island.versions.map((version, p) => versionCell(island, p, version, fragments[p] - version)),
    ),
  );
  const late = present(status).filter((island) =>
    island.versions.some((version, p) => version !== null && fragments[p] - version > 1),
  );
  const any = islands.some((island) => known(island.versions).length);
  const said = late.length
    ? `more than one version behind: ${numbered(late.map((island) => island.number))}`
    : "no island is more than one version behind";
  say("versions-says", any ? said : "no island has a version yet");
  put(
    box,
    html(
      "table",
      { class: count > 12 ? "versions dense" : "versions" },
      html("thead", null, head, count > 12 ? null : top),
      html("tbody", null, rows),
    ),
  );
}

function versionCell(island, p, version, behind) {
  const [kind, text] =
    version === null
      ? ["", "not received yet"]
      : behind <= 0
        ? ["now", "up to date"]
        : [behind === 1 ? "one" : "late", `${plural(behind, "version")} behind`];
  const title = `island ${island.number}, fragment ${p}: ${text}`;
  return html("td", { class: kind, title }, String(version ?? DASH));
}

const TONES = { down: "bad", stalled: "warn", quarantined: "warn", running: "good" };

function participation({ commits, goodput, islands, phase }) {
  const shares = known(islands.map((island) => island.participation));
  const said = `${percent(mean(shares))} of ${plural(commits, "commit")}, on average`;
  say("participation-says", shares.length ? `an island is in ${said}` : "no commit yet");
  const share = (island) =>
    html(
      "span",
      { class: "island", "--colour": island.colour },
      meter(island.participation ?? 0),
      percent(island.participation),
    );
  const columns = [
    ["island", islandName, "row"],
    ["state", (each) => html("span", { class: TONES[each.state] ?? "muted" }, each.state)],
  ];
  if (islands.some((island) => island.chip_kinds.length))
    columns.push(["chips", (each) => `${each.chips} ${each.chip_kinds.join(", then ")}`, "muted"]);
  columns.push(
    ["all commits", share],
    ["latest", (island) => percent(island.participation_recent), "number"],
    ["trains", (island) => percent(goodput?.liveness[island.number]), "number"],
    ["global step", (island) => compact(island.global_step), "number"],
    ["loss", (island) => loss(island.loss), "number"],
    ["restarts", (island) => String(island.restarts), "number"],
  );
  if (phase === "running")
    columns.push(["tokens/s a chip", (each) => compact(each.tokens_per_second_per_chip), "number"]);
  if (phase === "running" && islands.some((island) => island.mfu !== null))
    columns.push(["MFU", (island) => percent(island.mfu, 1), "number"]);
  put(byId("participation"), table(islands, columns));
}

function links({ links, phase, tokens_done }) {
  const moved = links.map((link) => link.sent_bytes + link.received_bytes);
  const most = Math.max(1, ...moved),
    total = sum(links.map((link) => link.sent_bytes));
  const each = tokens_done ? `, ${bytes(total / tokens_done)} per merged token` : "";
  const said = `${bytes(total)} sent in all${each}`;
  say("links-says", moved.length ? said : "nothing has been sent yet");
  const columns = [
    ["link of", (link) => link.name, "row"],
    ["", (_, i) => meter(moved[i] / most)],
    ["sent", (link) => bytes(link.sent_bytes), "number"],
    ["received", (link) => bytes(link.received_bytes), "number"],
  ];
  if (!still({ phase }))
    columns.push(
      ["sent now", (link) => `${bytes(link.sent_bytes_per_second)}/s`, "number"],
      ["received now", (link) => `${bytes(link.received_bytes_per_second)}/s`, "number"],
    );
  put(byId("links"), links.length ? table(links, columns) : "");
}

function logEvents({ log_events, started }) {
  const row = (tone, when, text) => html("li", { class: tone }, when, html("span", null, text));
  const title = (time) => started && new Date(1000 * (started + time)).toLocaleString();
  const rows = log_events.map(({ time, text, tone }) =>
    row(tone, html("time", { title: title(time) }, clockTime(time)), text),
  );
  const none = row("muted", html("span", null, DASH), "nothing worth a line yet");
  put(byId("log-events"), ...(rows.length ? rows.reverse() : [none]));
}
