// How long steps took: a row an island, a column a stretch of time, drawn on a canvas.

import {
  byId,
  clockTime,
  html,
  known,
  listen,
  median,
  percent,
  put,
  say,
  timeUnit,
} from "./format.js";
import { leftOf, rowOf } from "./chart.js";

const RIGHT = 14,
  AXIS = 20,
  TALLEST = 18,
  ROOM = 420; // pixels: of a row, and of all rows
const MOST = 1000; // cells of a row
const STEPS = [
  // [least ratio to the median, what the legend says], heat-0 to heat-6
  [0, "quicker than usual"],
  [0.8, "as usual"],
  [1.3, "1.5×"],
  [1.75, "2×"],
  [3, "4×"],
  [6, "8×"],
  [12, "16× its median or more"],
];
const OTHER = {
  waiting: "waiting for a shard",
  data: "waiting for data",
  joining: "joining",
  stalled: "stalled",
  quarantined: "quarantined",
  down: "down",
};
let shown = null; // {status, rows, islands, ...} of the last drawing
let cursor = null; // {row, bin}

/** An island's usual seconds from step to step, of the whole run. */
const usual = (curves, island) => median(curves.step[island.number].filter(known));

/**
 * What an island did in each stretch of time: {ratio} of its steps to its median, or {state}. A step
 * that is longer than a cell fills all cells in which it was under way; a wait is most of its gap.
 */
export function cells({ seconds, curves, timeline }, island) {
  const { width_seconds: width } = curves;
  const [steps, waits] = [curves.step[island.number], curves.wait[island.number]];
  const starved = new Set(curves.starved[island.number]);
  const spans = timeline.lanes.find(({ role }) => role === `learner-${island.number}`)?.spans ?? [];
  const row = [],
    absent = { state: "not there" };
  const its = usual(curves, island);
  let underWay = absent;
  for (let i = Math.min(MOST, Math.ceil(seconds / width)) - 1; i >= 0; i--) {
    const middle = (i + 0.5) * width;
    const state = spans.find(([from, to]) => from <= middle && middle <= to)?.[2];
    if (known(steps[i])) {
      const waited = waits[i] > steps[i] ? "waiting" : starved.has(i) && "data";
      underWay = waited ? { state: waited } : { seconds: steps[i], ratio: steps[i] / its };
      row[i] = underWay;
    } else row[i] = state === "running" ? underWay : state ? { state } : absent;
    if (state !== "running") underWay = absent;
  }
  return row;
}

/** The class of a cell's colour: heat-0 (quick) to heat-6 (16 times the median), or its state. */
const shade = ({ ratio, state }) => state ?? String(STEPS.findLastIndex(([from]) => ratio >= from));

function legend(rows) {
  const there = new Set(rows.flat().map(({ state }) => state));
  const item = (name, text, hidden) =>
    html("li", { hidden }, html("i", { class: `heat heat-${name}` }), text);
  put(
    byId("heat-legend"),
    ...STEPS.map(([, text], i) => item(i, text)),
    ...Object.entries(OTHER).map(([state, text]) => item(state, text, !there.has(state))),
  );
}

/** Colours as the style sheet has them for the present theme. */
function colours() {
  const of = {};
  for (const node of document.querySelectorAll("#heat-legend .heat"))
    of[node.className.split("heat-")[1]] = getComputedStyle(node).backgroundColor;
  return of;
}

const widthOf = (box) => Math.max(260, box.clientWidth);

/** A canvas follows neither its page's width nor its colours by itself. */
export const redrawHeat = () => shown && drawHeat(shown.status);

export function drawHeat(status) {
  const { curves, islands, seconds } = status;
  const rows = islands.map((island) => cells(status, island));
  const any = Object.values(curves.step).some((each) => each.length);
  byId("heat-card").hidden = !any;
  if (!any) return;
  legend(rows);
  says(status);
  const width = widthOf(byId("heat"));
  const row = rowOf(islands.length, ROOM, TALLEST);
  const left = leftOf(islands, width);
  const column = (width - left - RIGHT) / Math.max(1, seconds / curves.width_seconds);
  const [bins, height] = [rows[0].length, row * islands.length];
  const binSeconds = curves.width_seconds;
  shown = { status, rows, islands, width, left, row, bins, column, height, binSeconds };
  paint(byId("heat-canvas"), shown, seconds);
  moveTo(cursor);
}

function paint(canvas, { rows, islands, width, left, row, column, height }, seconds) {
  const scale = window.devicePixelRatio || 1,
    draw = canvas.getContext("2d"),
    fill = colours();
  canvas.width = width * scale;
  canvas.height = (height + AXIS) * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height + AXIS}px`;
  draw.scale(scale, scale);
  const gap = row > 4 ? 1 : 0;
  rows.forEach((cells, i) => {
    const names = cells.map(shade);
    for (let from = 0; from < names.length; ) {
      let to = from + 1;
      while (names[to] === names[from]) to += 1;
      if (fill[names[from]]) {
        draw.fillStyle = fill[names[from]];
        const end = Math.min(width - RIGHT, left + to * column);
        draw.fillRect(left + from * column, i * row, end - left - from * column, row - gap);
      }
      from = to;
    }
  });
  const style = getComputedStyle(byId("heat"));
  draw.fillStyle = style.color;
  draw.font = `12px ${style.fontFamily}`;
  draw.textBaseline = "middle";
  const write = (text, x, y, align) => {
    draw.textAlign = align;
    draw.fillText(text, x, y);
  };
  const most = Math.max(1, Math.floor(height / 28)); // names
  const every = islands.length > 24 || row < 12 ? Math.ceil(islands.length / most) : 1;
  islands.forEach((island, i) => {
    const y = Math.max(8, (i + 0.5) * row);
    if (i % every === 0) write(`island ${island.number}`, left - 8, y, "right");
  });
  write("0:00", left, height + AXIS / 2 + 2, "left");
  write(`${clockTime(seconds)} ${timeUnit(seconds)}`, width - RIGHT, height + AXIS / 2 + 2, "right");
}

/** The slowest now, in a sentence. */
function says({ curves, islands }) {
  const slow = islands.flatMap((island) => {
    const ratio = island.step_seconds / usual(curves, island);
    if (island.starved) return [`island ${island.number} (it waits for its data)`];
    return ratio >= 1.5 ? [`island ${island.number} (${ratio.toFixed(1)}×)`] : [];
  });
  const more = slow.length > 4 ? ` and ${slow.length - 4} more` : "";
  say(
    "heat-says",
    slow.length
      ? `slower than usual now: ${slow.slice(0, 4).join(", ")}${more}`
      : "colours are each island's step time, beside its own median",
  );
}

// --- the cursor -----------------------------------------------------------------------------------

function moveTo(to) {
  cursor = to;
  if (!shown) return;
  const { rows, islands, left, bins, row, column } = shown,
    line = byId("heat-cursor");
  line.hidden = cursor === null;
  if (cursor === null)
    return put(byId("heat-readout"), "Point at the map, or focus it and use the arrow keys.");
  cursor.row = Math.min(islands.length - 1, Math.max(0, cursor.row));
  cursor.bin = Math.min(bins - 1, Math.max(0, cursor.bin));
  line.style.left = `${left + cursor.bin * column}px`;
  line.style.top = `${cursor.row * row}px`;
  line.style.width = `${Math.max(3, column)}px`;
  line.style.height = `${Math.max(3, row)}px`;
  const cell = rows[cursor.row][cursor.bin];
  put(byId("heat-readout"), ...readout(cell, islands[cursor.row], cursor.bin * shown.binSeconds));
}

function readout({ ratio, seconds, state }, island, from) {
  const to = from + shown.binSeconds;
  const time = (seconds) =>
    seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1000 * seconds).toFixed(0)} ms`;
  const beside = () => `${ratio.toFixed(1)}× its median ${time(seconds / ratio)}`;
  const said = state ?? `a step took about ${time(seconds)}, ${beside()}`;
  const span = `${clockTime(from)}${to - from < 2 ? "" : ` to ${clockTime(to)}`}`;
  const share = island.participation === null ? "" : ` · in ${percent(island.participation)} of commits`;
  return [html("b", null, `island ${island.number}`), ` · ${span} · ${said}${share}`];
}

export function listenToHeat() {
  const box = byId("heat");
  new ResizeObserver(() => shown?.width !== widthOf(box) && redrawHeat()).observe(box);
  for (const changed of ["print", "(prefers-color-scheme: dark)"])
    matchMedia(changed).addEventListener("change", redrawHeat);
  listen(
    box,
    moveTo,
    (x, y) => {
      const bin = Math.floor((x - shown.left) / shown.column),
        row = Math.floor(y / shown.row);
      const inside = bin >= 0 && bin < shown.bins && row >= 0 && row < shown.islands.length;
      return inside ? { row, bin } : null;
    },
    () => {
      const { row, bin } = cursor ?? { row: 0, bin: shown.bins - 1 };
      return {
        ArrowLeft: { row, bin: cursor ? bin - 1 : bin },
        ArrowRight: { row, bin: bin + 1 },
        ArrowUp: { row: row - 1, bin },
        ArrowDown: { row: row + 1, bin },
        PageUp: { row: row - 10, bin },
        PageDown: { row: row + 10, bin },
        Home: { row, bin: 0 },
        End: { row, bin: shown.bins - 1 },
      };
    },
  );
}
