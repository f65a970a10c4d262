// Faults and what follows them, and the legend of all that is drawn.

import { byId, clockTime, html, svg } from "./format.js";

const STATES = ["joining", "running", "stalled", "quarantined", "down"];
const MARKS = {
  kill: ["killed on purpose", "M-4-4L4 4M4-4L-4 4", true],
  fault: ["another fault", "M-5-4H5L0 5Z"],
  exit: ["crashed", "M-4-4L4 4M4-4L-4 4", true],
  hang: ["hung: stacks are in its log", "M-4-5H4L-4 5H4Z"],
  restart: ["started again", "M-5 4H5L0-5Z"],
  merged: ["merged again", "M0-6L1.6-1.9 6-1.9 2.5.9 3.8 5.2 0 2.6-3.8 5.2-2.5.9-6-1.9-1.6-1.9Z"],
};

export function marks({ status, x, rows, bottom, many }) {
  const parts = [],
    size = many ? 0.75 : 1;
  for (const mark of status.timeline.marks) {
    const row = rows.get(mark.role);
    if (!row || !MARKS[mark.kind]) continue;
    if (mark.kind === "kill" || mark.kind === "fault" || mark.kind === "exit") {
      parts.push(
        svg("line", {
          class: "strike",
          x1: x(mark.time),
          x2: x(mark.time),
          y1: row.top,
          y2: bottom,
          opacity: many ? 0.25 : undefined,
        }),
      );
    }
    const glyph = symbol(mark.kind);
    glyph.setAttribute(
      "transform",
      `translate(${x(mark.time)} ${row.top + row.bar / 2}) scale(${size})`,
    );
    glyph.append(svg("title", null, `${clockTime(mark.time)} ${mark.text}`));
    parts.push(glyph);
  }
  return parts;
}

function symbol(kind) {
  const [, shape, crossed] = MARKS[kind];
  if (!crossed) return svg("g", null, svg("path", { class: `mark ${kind}`, d: shape }));
  return svg(
    "g",
    null,
    svg("circle", { class: `mark ${kind}`, r: 7 }),
    svg("path", {
      d: shape,
      transform: "scale(.7)",
      stroke: "var(--card)",
      "stroke-width": 2.6,
      fill: "none",
    }),
  );
}

export function legend({ status, many }) {
  const states = new Set(
    status.timeline.lanes.flatMap((lane) => lane.spans.map(([, , state]) => state)),
  );
  const kinds = new Set(status.timeline.marks.map((mark) => mark.kind));
  const key = [
    `${[...states].sort()}`,
    `${[...kinds].sort()}`,
    status.timeline.marks_left_out,
    status.curves.heldout.length > 0,
  ].join("|");
  const list = byId("legend");
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  const item = (picture, text) =>
    html("li", null, svg("svg", { viewBox: "0 0 18 12", "aria-hidden": "true" }, picture), text);
  const box = { x: 0, y: 1, width: 18, height: 10, rx: 1.5 };
  const stripes = [2, 8, 14].map((i) =>
    svg("path", { d: `M${i - 2} 11l6-10`, stroke: "var(--muted)", "stroke-width": 2 }),
  );
  const looks = {
    running: svg("rect", { ...box, class: "key" }),
    joining: svg("rect", { ...box, class: "key", opacity: 0.28 }),
    stalled: svg("g", null, stripes),
    quarantined: svg(
      "g",
      null,
      stripes.map((each) => each.cloneNode()),
    ),
    down: svg("rect", { ...box, class: "key-down" }),
  };
  const items = STATES.filter((state) => states.has(state)).map((state) =>
    item(looks[state], state),
  );
  if (!many)
    items.push(
      item(
        svg("rect", { x: 0, y: 4, width: 18, height: 4, class: "key" }),
        "below a lane: share of commits taken part in",
      ),
    );
  for (const kind of Object.keys(MARKS).filter((each) => kinds.has(each))) {
    const glyph = symbol(kind);
    glyph.setAttribute("transform", "translate(9 6)");
    items.push(item(glyph, MARKS[kind][0]));
  }
  if (status.curves.heldout.length)
    items.push(
      item(svg("line", { x1: 0, x2: 18, y1: 6, y2: 6 }), "held-out loss of the global model"),
    );
  if (status.timeline.marks_left_out)
    items.push(html("li", null, `${status.timeline.marks_left_out} older marks are left out`));
  list.replaceChildren(...items);
}
