// Islands, shards and losses over one time axis, with a cursor for mouse and keyboard.

import {
  byId,
  clockTime,
  html,
  known,
  label,
  line,
  listen,
  loss,
  mean,
  median,
  numbered,
  percent,
  put,
  svg,
  timeUnit,
} from "./format.js";
import { lanes, patterns } from "./lanes.js";
import { legend, marks } from "./marks.js";

const MANY = 12; // islands: beyond that their lanes are thin
/** Pixels for the names at the left, here and in the map of step times. */
export const leftOf = (islands, width) => (islands.length > MANY || width < 640 ? 92 : 176);
/** Pixels of each of so many rows: whole ones, but where they are thinner than two, colours mix. */
export const rowOf = (count, room, tallest) =>
  room / count < 2 ? room / count : Math.min(tallest, Math.floor(room / count));
const ROOM = 600; // pixels of all their lanes together: the loss stays in sight
const [RIGHT, AXIS, LOSS_HEIGHT, GAP] = [14, 24, 190, 26]; // pixels

let shown = null; // {status, scale, width, ...} of the last drawing
let cursor = null; // seconds

export function drawChart(status) {
  const box = byId("chart");
  const width = Math.max(260, box.clientWidth);
  const layout = place(status, width);
  const picture = svg("svg", {
    viewBox: `0 0 ${width} ${layout.height}`,
    height: layout.height,
    "aria-hidden": "true",
  });
  picture.append(
    patterns(status),
    ...axis(layout),
    ...lanes(layout),
    ...curves(layout),
    ...marks(layout),
  );
  const mark = line("cursor", 0, 0, 0, layout.bottom, { visibility: "hidden" });
  picture.append(mark);
  box.replaceChildren(picture);
  shown = { ...layout, mark };
  legend(layout);
  moveTo(cursor);
}

function place(status, width) {
  const lanes = status.timeline.lanes;
  const islands = lanes.filter((lane) => lane.role.startsWith("learner"));
  const shards = lanes.filter((lane) => lane.role.startsWith("syncer"));
  const many = status.islands.length > MANY;
  const narrow = width < 640 && !many;
  const left = narrow ? 0 : leftOf(status.islands, width);
  const space = narrow ? 17 : 0; // for a name above each row
  const thin = rowOf(islands.length, ROOM, 14);
  const pitch = many ? thin : space + 34,
    strip = many ? (thin < 6 ? 0 : Math.round(0.22 * thin)) : 4;
  const thick = thin < 2 ? thin : Math.ceil(0.6 * thin) - Math.min(1, strip);
  const bar = many ? thick : 16;
  const every = Math.ceil(14 / pitch); // one in so many islands has its name
  const shardPitch = space + (many ? 12 : 19);
  const lossTop = islands.length * pitch + shards.length * shardPitch + GAP;
  const { loss: losses, heldout } = status.curves;
  const lossHeight =
    heldout.length || Object.values(losses).some((each) => each.length) ? LOSS_HEIGHT : 40;
  const bottom = lossTop + lossHeight;
  const height = bottom + AXIS;
  const end = Math.max(1, status.seconds);
  // By a clock that is behind, a run's first seconds were before it began.
  const x = (seconds) =>
    left + (Math.min(Math.max(0, seconds), end) / end) * (width - left - RIGHT);
  const below = islands.length * pitch + 4 + space;
  const shardBar = many ? 6 : 8;
  const rows = new Map([
    ...islands.map((lane, i) => [
      lane.role,
      { lane, top: i * pitch + space, bar, strip, unnamed: i % every > 0 },
    ]),
    ...shards.map((lane, i) => [
      lane.role,
      { lane, top: below + i * shardPitch, bar: shardBar },
    ]),
  ]);
  const places = { width, height, bottom, left, x, end, rows, lossTop, lossHeight };
  return { status, ...places, narrow, many, strip };
}

function niceStep(span, count, steps) {
  return (
    steps.find((step) => span / step <= count) ??
    steps.at(-1) * Math.ceil(span / count / steps.at(-1))
  );
}

function axis({ end, x, width, height, bottom, left }) {
  const step = niceStep(
    end,
    width < 640 ? 4 : 9,
    [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400],
  );
  const parts = [];
  const days = step % 86400 === 0;
  for (let t = 0; t <= end; t += step) {
    parts.push(line("grid", x(t), x(t), 0, bottom));
    const anchor = t && x(t) > 14 ? "middle" : "start";
    const text = days ? String(t / 86400) : clockTime(t);
    if (x(t) < width - RIGHT - 60) parts.push(label(x(t), height - 6, anchor, text));
  }
  parts.push(label(width - RIGHT, height - 6, "end", days ? "days" : timeUnit(end)));
  parts.push(line("axis", left, width - RIGHT, bottom, bottom));
  return parts;
}

/** The range of an axis, and its ticks: [value, text]. Of a long run the flat end is what matters. */
function scale(values) {
  let low = Math.min(...values),
    high = Math.max(...values);
  const log = low > 0 && high > 2 * low;
  if (log) {
    const apart = high / low;
    const of = apart > 1e4 ? [1] : apart > 8 ? [1, 2, 5] : [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8];
    const ticks = [];
    for (let unit = 10 ** Math.floor(Math.log10(low)); unit <= high; unit *= 10)
      ticks.push(...of.map((each) => each * unit).filter((each) => low <= each && each <= high));
    return { low, high, log, ticks: ticks.map((each) => [each, String(+each.toPrecision(2))]) };
  }
  const margin = Math.abs(high) / 2 || 0.5;
  if (high - low < 1e-3 * margin) [low, high] = [low - margin, high + margin];
  const unit = 10 ** Math.floor(Math.log10((high - low) / 5));
  const step = niceStep(high - low, 5, [unit, 2 * unit, 5 * unit, 10 * unit]);
  const digits = Math.max(1, -Math.floor(Math.log10(step)));
  [low, high] = [Math.floor(low / step) * step, Math.ceil(high / step) * step];
  const count = Math.round((high - low) / step) + 1;
  const ticks = Array.from({ length: count }, (_, i) => low + i * step);
  return { low, high, log, ticks: ticks.map((each) => [each, each.toFixed(digits)]) };
}

function curves({ status, x, left, lossTop, lossHeight, width, narrow }) {
  const { loss: losses, heldout, width_seconds: bin } = status.curves;
  const values = [...Object.values(losses).flat(), ...heldout.map(([, value]) => value)].filter(
    (value) => value !== null,
  );
  if (!values.length)
    return [label(left, lossTop + 18, "start", "The loss is not known yet.")];
  const { low, high, log, ticks } = scale(values);
  const place = log ? Math.log : (value) => value;
  const y = (value) =>
    lossTop + ((place(high) - place(value)) / (place(high) - place(low))) * lossHeight;
  const parts = [];
  for (const [value, text] of ticks) {
    parts.push(line("grid", left, width - RIGHT, y(value), y(value)));
    parts.push(
      narrow ? label(0, y(value) - 3, "start", text) : label(left - 10, y(value) + 4, "end", text),
    );
  }
  const name = svg("tspan", { class: "name" }, "Loss");
  const unit = [status.loss_unit, log && "log scale"].filter(Boolean).join(", ");
  const above = lossTop - (narrow ? 17 : 8);
  parts.push(label(left, above, "start", name, svg("tspan", { dx: 8 }, unit)));
  for (const island of status.islands) {
    const points = (losses[island.number] ?? []).map((value, i) =>
      value === null ? null : [x((i + 0.5) * bin), y(value)],
    );
    const curve = svg("path", { class: "curve", d: path(points) });
    parts.push(svg("g", { class: "island", "--colour": island.colour }, curve));
  }
  if (heldout.length) {
    const points = heldout.map(([time, value]) => [x(time), y(value)]);
    parts.push(svg("path", { class: "heldout", d: path(points) }));
    const [px, py] = points.at(-1);
    parts.push(svg("circle", { class: "dot", cx: px, cy: py, r: 4 }));
  }
  return parts;
}

/** A line through the points; where much more than usual is missing (null), it is interrupted. */
function path(points) {
  const there = points.flatMap((point, i) => (point === null ? [] : [i]));
  const apart = there.map((i, n) => i - there[n - 1]);
  const most = Math.max(7, 3 * (median(apart.slice(1)) || 0));
  const pen = (n) => (apart[n] <= most ? "L" : "M");
  return there.map((i, n) => pen(n) + points[i].map((each) => each.toFixed(1)).join(" ")).join("");
}

// --- the cursor ---------------------------------------------------------------------------------

function moveTo(seconds) {
  cursor = seconds;
  if (!shown) return;
  const { status, mark, x, end } = shown;
  mark.setAttribute("visibility", cursor === null ? "hidden" : "visible");
  if (cursor === null)
    return put(byId("readout"), "Point at the chart, or focus it and use the arrow keys.");
  cursor = Math.min(end, Math.max(0, cursor));
  for (const name of ["x1", "x2"]) mark.setAttribute(name, x(cursor));
  put(byId("readout"), ...readout(status, cursor));
}

function readout(status, at) {
  const bin = Math.floor(at / status.curves.width_seconds);
  const parts = [html("b", null, clockTime(at))];
  const numbers = new Map(); // by state, of many islands
  for (const lane of status.timeline.lanes.filter((each) => each.role.startsWith("learner"))) {
    const number = lane.role.split("-")[1];
    const state = lane.spans.find(([start, end]) => start <= at && at <= end)?.[2] ?? "not there";
    numbers.set(state, [...(numbers.get(state) ?? []), number]);
    if (shown.many) continue;
    const value = status.curves.loss[number]?.[bin],
      share = status.curves.participation[number]?.[bin];
    const more = [
      state,
      typeof value === "number" && `loss ${loss(value)}`,
      typeof share === "number" && `in ${percent(share)} of commits`,
    ];
    parts.push(" · ", html("b", null, lane.name), " ", more.filter(Boolean).join(", "));
  }
  if (shown.many) {
    for (const [state, each] of numbers)
      parts.push(" · ", html("b", null, numbered(each)), ` ${state}`);
    const shares = Object.values(status.curves.participation).map((each) => each[bin]);
    const there = shares.filter(known);
    if (there.length) parts.push(` · in ${percent(mean(there))} of commits, on average`);
  }
  const before = status.curves.heldout.filter(([time]) => time <= at).at(-1);
  if (before) parts.push(" · ", html("b", null, "held-out"), ` ${loss(before[1])}`);
  return parts;
}

export function listenToChart() {
  const box = byId("chart");
  listen(
    box,
    moveTo,
    (x) => {
      const { left, width, end } = shown;
      return x < left ? null : ((x - left) / (width - left - RIGHT)) * end;
    },
    () => {
      const { status, end } = shown;
      const step = Math.max(status.curves.width_seconds, end / 100),
        now = cursor ?? end;
      return {
        ArrowLeft: now - step,
        ArrowRight: now + step,
        PageUp: now - 10 * step,
        PageDown: now + 10 * step,
        Home: 0,
        End: end,
      };
    },
  );
  new ResizeObserver(
    () => shown && shown.width !== Math.max(260, box.clientWidth) && drawChart(shown.status),
  ).observe(box);
}
