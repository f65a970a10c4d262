// The ways back of learners: where the seconds from death to merge went.

import { byId, clockTime, html, median, percent, put, say, stack, sum, table } from "./format.js";

const PHASES = {
  detect: ["noticed", "until its supervisor noticed that it was dead"],
  pause: ["pause", "until its next incarnation was started"],
  away: ["away", "until it was there again, started from outside"],
  process: ["process", "until its process was there, with its imports"],
  devices: ["devices", "until JAX had its devices, and data were open"],
  compile: ["compile", "programs compiled, or loaded"],
  restore: ["restore", "its part of a snapshot"],
  receive: ["receive", "every fragment"],
  first_step: ["first step", "until its first step had ended; on an accelerator, had begun"],
  merge: ["merge", "until a commit had its push"],
};
const seconds = (value) =>
  value < 600 ? `${value.toFixed(value < 10 ? 1 : 0)} s` : clockTime(value);

export function rejoins(status) {
  const found = [...status.rejoins].reverse();
  byId("rejoins-card").hidden = !found.length;
  if (!found.length) return;
  const merged = found.filter((each) => each.seconds !== null);
  const usual = median(merged.map((each) => each.seconds));
  const total = (each) => sum(Object.values(each.phases));
  const longest = Math.max(1e-9, ...found.map(total));
  say(
    "rejoins-says",
    merged.length
      ? `from death to merge: ${seconds(usual)}${merged.length > 1 ? `, median of the latest ${merged.length}` : ""}`
      : "not merged yet",
  );
  const bar = (each) => {
    const parts = Object.entries(each.phases);
    const said = parts.map(([phase, value]) => `${PHASES[phase][0]} ${seconds(value)}`);
    return stack(
      {
        class: "phases",
        "aria-label": said.join(", "),
        "width%": percent(total(each) / longest, 1),
      },
      parts.map(([phase, value]) => [
        `${PHASES[phase][0]}: ${seconds(value)} (${PHASES[phase][1]})`,
        value / Math.max(1e-9, total(each)),
        { "data-phase-of": phase },
      ]),
    );
  };
  const after = (each) => (each.seconds === null ? "not yet" : seconds(each.seconds));
  const columns = [
    ["island", (each) => `island ${each.learner}`, "row"],
    ["died at", (each) => clockTime(each.time)],
    ["phases", bar, "wide-cell"],
    ["merged after", after, "number"],
  ];
  const there = Object.keys(PHASES).filter((phase) => found.some((each) => phase in each.phases));
  const legend = there.map((phase) => {
    const [name, title] = PHASES[phase];
    return html("li", { title }, html("i", { "data-phase-of": phase }), name);
  });
  put(
    byId("rejoins"),
    table(found, columns),
    html("ul", { class: "causes phases-legend" }, legend),
  );
}
