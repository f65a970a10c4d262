// Faults and what follows them, and the legend of all that is drawn.

import { byId, clockTime, html, line, plural, put, sum, svg } from "./format.js";

const CROSS = "M-4-4L4 4M4-4L-4 4"; // in a circle
const MARKS = {
  kill: ["killed on purpose", CROSS],
  fault: ["fault other than a kill", "M-5-4H5L0 5Z"],
  exit: ["crashed", CROSS],
  hang: ["hung: stacks are in its log", "M-4-5H4L-4 5H4Z"],
  restart: ["started again", "M-5 4H5L0-5Z"],
  merged: ["merged again", "M0-6L1.6-1.9 6-1.9 2.5.9 3.8 5.2 0 2.6-3.8 5.2-2.5.9-6-1.9-1.6-1.9Z"],
};

export function marks({ status, x, rows, bottom, many }) {
  const parts = [],
    size = many ? 0.75 : 1;
  for (const mark of status.timeline.marks) {
    const row = rows.get(mark.role);
    if (!row) continue;
    const at = x(mark.time);
    if (["kill", "fault", "exit"].includes(mark.kind))
      parts.push(line("strike", at, at, row.top, bottom, { opacity: many && 0.25 }));
    const place = `translate(${at} ${row.top + row.bar / 2}) scale(${size})`;
    const glyph = symbol(mark.kind, place);
    glyph.append(svg("title", null, `${clockTime(mark.time)} ${mark.text}`));
    parts.push(glyph);
  }
  return parts;
}

function symbol(kind, transform) {
  const [, d] = MARKS[kind];
  if (d !== CROSS) return svg("g", { transform }, svg("path", { class: `mark ${kind}`, d }));
  const pen = { stroke: "var(--card)", "stroke-width": 2.6, fill: "none" };
  return svg(
    "g",
    { transform },
    svg("circle", { class: `mark ${kind}`, r: 7 }),
    svg("path", { d, transform: "scale(.7)", ...pen }),
  );
}

export function legend({ status, strip }) {
  const states = new Set(
    status.timeline.lanes.flatMap((lane) => lane.spans.map(([, , state]) => state)),
  );
  const kinds = new Set(status.timeline.marks.map((mark) => mark.kind));
  const item = (picture, text) =>
    html("li", null, svg("svg", { viewBox: "0 0 18 12", "aria-hidden": "true" }, picture), text);
  const box = { x: 0, y: 1, width: 18, height: 10, rx: 1.5 };
  const d = "M0 11l6-10M6 11l6-10M12 11l6-10";
  const stripes = svg("path", { d, stroke: "var(--muted)", "stroke-width": 2 });
  const looks = {
    joining: svg("rect", { ...box, class: "key", opacity: 0.28 }),
    running: svg("rect", { ...box, class: "key" }),
    stalled: stripes,
    quarantined: svg("g", null, stripes.cloneNode(), svg("rect", { ...box, class: "key-frame" })),
    down: svg("rect", { ...box, class: "key-down" }),
  };
  const items = Object.entries(looks)
    .filter(([state]) => states.has(state))
    .map(([state, look]) => item(look, state));
  const below = svg("rect", { x: 0, y: 4, width: 18, height: 4, class: "key" });
  if (strip) items.push(item(below, "below a bar: share of commits taken part in"));
  for (const [kind, [text]] of Object.entries(MARKS))
    if (kinds.has(kind)) items.push(item(symbol(kind, "translate(9 6)"), text));
  if (status.curves.heldout.length)
    items.push(item(line("", 0, 18, 6, 6), "held-out loss of the global model"));
  const before = sum(Object.values(status.timeline.counts)) - status.timeline.marks.length;
  if (before) items.push(html("li", null, `${plural(before, "older mark")} left out`));
  const { absorbed } = status.timeline;
  if (absorbed) items.push(html("li", null, `short spans that are part of others: ${absorbed}`));
  put(byId("legend"), ...items);
}
