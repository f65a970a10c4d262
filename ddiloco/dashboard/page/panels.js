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
  percent,
  plural,
  say,
} from "./format.js";
import { goodput } from "./goodput.js";
import { rejoins } from "./rejoins.js";

const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : NaN);
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

function figures(status) {
  const shares = status.islands
    .map((island) => island.participation_recent)
    .filter((share) => share !== null);
  const sent = status.links.reduce((sum, link) => sum + link.sent_bytes, 0);
  const rate = status.links.reduce((sum, link) => sum + link.sent_bytes_per_second, 0);
  const up = status.islands.filter((island) => island.state === "running").length;
  const account = status.goodput ?? {};
  const over = status.phase === "over";
  const restarts = status.islands.reduce((sum, island) => sum + island.restarts, 0);
  const rows = [
    ["Held-out loss", loss(status.heldout_loss), measures(status.heldout_measures)],
    over
      ? ["Islands", String(status.islands.length), plural(restarts, "restart")]
      : [
          "Islands up",
          `${up} of ${status.islands.length}`,
          status.tokens_per_second === null
            ? plural(restarts, "restart")
            : speed(status),
        ],
    [
      "Goodput",
      percent(account.goodput, 1),
      account.goodput_training
        ? `${percent(account.goodput_training, 1)} without start-up`
        : "of the chip time",
    ],
    ["Uptime", percent(account.uptime, 1), "some island was training"],
    [
      "Participation",
      percent(mean(shares)),
      status.outer_gradients.staleness === null
        ? "of the latest commits"
        : `of commits; updates ${gradients(status.outer_gradients)}`,
    ],
    ["Sent", bytes(sent), over ? `${plural(status.commits, "commit")}` : `${bytes(rate)}/s now`],
  ];
  byId("figures").replaceChildren(
    ...rows.map(([name, value, more]) =>
      html("div", null, html("dt", null, name), html("dd", null, value), html("dd", null, more)),
    ),
  );
}

// What the islands' updates have in common.
function gradients(found) {
  const names = { agreement: "cosine", rho: "rho", length: "length merged" };
  const steps = found.staleness === null ? [] : [`of up to ${Math.round(found.staleness)} steps`];
  const said = Object.entries(names)
    .filter(([name]) => found[name] !== null)
    .map(([name, text]) => `${text} ${cosine(found[name])}`);
  return [...steps, ...said].join(", ");
}

// What else the model measures, in the place of the loss's unit.
function measures(values) {
  const parts = Object.entries(values).map(
    ([name, value]) => `${name.replaceAll("_", " ")} ${loss(value)}`,
  );
  return parts.join(", ") || "nats per token";
}

function speed(status) {
  const chip = status.tokens_per_second_per_chip;
  const each = chip === null ? "" : `, ${compact(chip)} a chip`;
  const mfu = status.mfu === null ? "" : `, ${percent(status.mfu, 1)} MFU`;
  return `${compact(status.tokens_per_second)} tokens/s${each}${mfu}`;
}

function overTime(status) {
  const by = new Map();
  for (const island of status.islands)
    by.set(island.state, [...(by.get(island.state) ?? []), island.number]);
  const order = [
    "down",
    "stalled",
    "quarantined",
    "joining",
    "running",
    "left",
    "ended",
    "unknown",
  ];
  const parts = order
    .filter((state) => by.has(state))
    .map((state) => {
      const numbers = by.get(state);
      return numbers.length === status.islands.length
        ? `all ${numbers.length} islands: ${state}`
        : `${state}: ${numbers.length > 6 ? numbers.length : join(numbers)}`;
    });
  if (status.phase === "over" || status.phase === "silent")
    return say("over-time-says", struck(status.timeline.marks));
  say("over-time-says", parts.join(" · ") || "no island has said hello yet");
}

function struck(marks) {
  const count = (...kinds) => marks.filter((mark) => kinds.includes(mark.kind)).length;
  const parts = [
    ["kill", count("kill")],
    ["other fault", count("fault")],
    ["crash", count("exit")],
    ["restart", count("restart")],
    ["hang", count("hang")],
  ];
  const there = parts
    .filter(([, n]) => n)
    .map(([word, n]) => (n > 1 && word === "crash" ? `${n} crashes` : plural(n, word)));
  return join(there) || "nothing struck this run";
}

function bars(rows) {
  const items = rows.flatMap(([name, value, share]) => [
    html("span", null, name),
    html("b", null, value),
    html("span", { class: "bar" }, html("i", { "width%": percent(share, 2) })),
  ]);
  return html("div", { class: "bars" }, items);
}

function waiting(status) {
  say("waiting-says", status.waiting.text);
  const { outcomes, left_out, recent } = status.waiting;
  const parts = [];
  if (outcomes.length) {
    parts.push(html("h3", null, "Why rounds ended"));
    parts.push(
      bars(
        outcomes.map((each) => [each.text, `${percent(each.share)} (${each.count})`, each.share]),
      ),
    );
  }
  if (left_out.length) {
    const most = Math.max(...left_out.map((each) => each.count));
    parts.push(html("h3", { class: "spaced" }, "Why islands were left out"));
    parts.push(
      bars(
        left_out.map((each) => [
          `island ${each.island}: ${each.reason}`,
          `${each.count}×`,
          each.count / most,
        ]),
      ),
    );
  }
  byId("outcomes").replaceChildren(...parts);
  byId("rounds-details").hidden = !recent.length;
  const head = ["ended", "fragment", "version", "took", "why it ended", "left out"];
  const rows = recent.map((round) =>
    html(
      "tr",
      null,
      html("td", null, clockTime(round.time)),
      html("td", { class: "number" }, String(round.fragment)),
      html("td", { class: "number" }, String(round.version ?? "–")),
      html("td", { class: "number" }, round.seconds === null ? DASH : `${round.seconds.toFixed(2)} s`),
      html("td", { class: "text" }, round.reason),
      html(
        "td",
        { class: "text" },
        Object.entries(round.absent)
          .map(([m, why]) => `island ${m}: ${why}`)
          .join("; ") || "none",
      ),
    ),
  );
  byId("rounds").replaceChildren(table(head, rows));
}

function table(head, rows, numbers = []) {
  const cells = head.map((name) =>
    html("th", { scope: "col", class: numbers.includes(name) ? "number" : undefined }, name),
  );
  return html(
    "table",
    null,
    html("thead", null, html("tr", null, cells)),
    html("tbody", null, rows),
  );
}

function numbered(numbers) {
  if (numbers.length > 6) return plural(numbers.length, "island");
  return `island${numbers.length > 1 ? "s" : ""} ${join(numbers)}`;
}

function versions(status) {
  const count = status.fragments.length,
    box = byId("versions");
  if (!count) {
    say(
      "versions-says",
      status.merging ? "no fragment has been committed yet" : "no island syncs in this run",
    );
    return box.replaceChildren();
  }
  const late = new Set();
  const head = html(
    "tr",
    null,
    html("th", { scope: "col" }, html("span", { class: "muted" }, "fragment")),
    status.fragments.map((_, p) => html("th", { scope: "col" }, String(p))),
  );
  const top = html(
    "tr",
    null,
    html("th", { scope: "row" }, "global model"),
    status.fragments.map((version) => html("td", { class: "global" }, String(version ?? "–"))),
  );
  const rows = status.islands.map((island) =>
    html(
      "tr",
      null,
      html("th", { scope: "row" }, islandName(island)),
      island.versions.map((version, p) => {
        const behind = version === null ? null : status.fragments[p] - version;
        if (behind > 1) late.add(island.number);
        const kind = behind === null ? "" : behind <= 0 ? "now" : behind === 1 ? "one" : "late";
        const text =
          behind === null
            ? "not received yet"
            : behind <= 0
              ? "up to date"
              : `${plural(behind, "version")} behind`;
        return html(
          "td",
          { class: kind, title: `island ${island.number}, fragment ${p}: ${text}` },
          version === null ? "–" : String(version),
        );
      }),
    ),
  );
  const any = status.islands.some((island) => island.versions.some((version) => version !== null));
  say(
    "versions-says",
    !any
      ? "no island has a version yet"
      : late.size
        ? `more than one version behind: ${numbered([...late])}`
        : "no island is more than one version behind",
  );
  box.replaceChildren(
    html(
      "table",
      { class: count > 12 ? "versions dense" : "versions" },
      html("thead", null, head, count > 12 ? null : top),
      html("tbody", null, rows),
    ),
  );
}

function participation(status) {
  const shares = status.islands
    .map((island) => island.participation)
    .filter((share) => share !== null);
  say(
    "participation-says",
    shares.length
      ? `an island is in ${percent(mean(shares))} of ${plural(status.commits, "commit")}, on average`
      : "no commit yet",
  );
  const mfu = status.islands.some((island) => island.mfu !== null);
  const numbers = ["restarts", "step", "loss", "live", "tokens/s a chip", "MFU"];
  const head = ["island", "state", "all commits", "latest", "live", "step", "loss", "restarts"];
  const kinds = status.islands.some((island) => island.chip_kinds.length);
  if (kinds) head.push("chips");
  if (status.phase === "running") head.push("tokens/s a chip", ...(mfu ? ["MFU"] : []));
  const tone = { down: "bad", stalled: "warn", quarantined: "warn", running: "good" };
  const rows = status.islands.map((island) =>
    html(
      "tr",
      null,
      html("th", { scope: "row" }, islandName(island)),
      html("td", { class: tone[island.state] ?? "muted" }, island.state),
      html(
        "td",
        { class: "island", "--colour": island.colour },
        html(
          "span",
          { class: "meter" },
          html("i", { "width%": percent(island.participation ?? 0) }),
        ),
        percent(island.participation),
      ),
      html("td", null, percent(island.participation_recent)),
      html("td", { class: "number" }, percent(status.goodput?.islands[island.number]?.liveness)),
      html("td", { class: "number" }, compact(island.global_step)),
      html("td", { class: "number" }, loss(island.loss)),
      html("td", { class: "number" }, String(island.restarts)),
      kinds
        ? html("td", { class: "muted" }, `${island.chips} ${island.chip_kinds.join(", then ")}`)
        : null,
      status.phase === "running"
        ? html("td", { class: "number" }, compact(island.tokens_per_second_per_chip))
        : null,
      status.phase === "running" && mfu
        ? html("td", { class: "number" }, percent(island.mfu, 1))
        : null,
    ),
  );
  byId("participation").replaceChildren(table(head, rows, numbers));
}

function links(status) {
  const moved = status.links.map((link) => link.sent_bytes + link.received_bytes);
  const most = Math.max(1, ...moved),
    total = status.links.reduce((sum, link) => sum + link.sent_bytes, 0);
  const each = status.tokens_done ? `, ${bytes(total / status.tokens_done)} per merged token` : "";
  say(
    "links-says",
    moved.length ? `${bytes(total)} sent in all${each}` : "nothing has been sent yet",
  );
  const over = status.phase === "over" || status.phase === "silent";
  const rows = status.links.map((link, i) =>
    html(
      "tr",
      null,
      html("th", { scope: "row" }, link.name),
      html(
        "td",
        null,
        html("span", { class: "meter" }, html("i", { "width%": percent(moved[i] / most, 1) })),
      ),
      html("td", { class: "number" }, bytes(link.sent_bytes)),
      html("td", { class: "number" }, bytes(link.received_bytes)),
      over
        ? null
        : [
            html("td", { class: "number" }, `${bytes(link.sent_bytes_per_second)}/s`),
            html("td", { class: "number" }, `${bytes(link.received_bytes_per_second)}/s`),
          ],
    ),
  );
  const head = ["link of", "", "sent", "received", ...(over ? [] : ["sent now", "received now"])];
  byId("links").replaceChildren(rows.length ? table(head, rows, head.slice(2)) : "");
}

function logEvents(status) {
  const rows = [...status.log_events]
    .reverse()
    .map((each) =>
      html(
        "li",
        { class: each.tone },
        html("time", null, clockTime(each.time)),
        html("span", null, each.text),
      ),
    );
  byId("log-events").replaceChildren(
    ...(rows.length
      ? rows
      : [
          html(
            "li",
            { class: "muted" },
            html("span", null, "–"),
            html("span", null, "nothing worth a line yet"),
          ),
        ]),
  );
}
