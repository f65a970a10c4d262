// Islands, shards and losses over one time axis, with a cursor for mouse and keyboard.

import { byId, clockTime, loss, percent, svg, html } from "./format.js";
import { lanes, patterns } from "./lanes.js";
import { legend, marks } from "./marks.js";

const MANY = 12; // islands: beyond that their lanes are thin, without strips
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
  const line = svg("line", {
    class: "cursor",
    y1: 0,
    y2: layout.bottom,
    visibility: "hidden",
  });
  picture.append(line);
  box.replaceChildren(picture);
  shown = { ...layout, line };
  legend(layout);
  moveTo(cursor);
}

function place(status, width) {
  const narrow = width < 640;
  const lanes = status.timeline.lanes;
  const islands = lanes.filter((lane) => lane.role.startsWith("learner"));
  const shards = lanes.filter((lane) => lane.role.startsWith("syncer"));
  const many = islands.length > MANY;
  const left = narrow ? 0 : many ? 92 : 176;
  const label = narrow ? 17 : 0;
  const bar = many ? 9 : 16,
    strip = many ? 0 : 6;
  const pitch = label + bar + strip + (many ? 5 : 12);
  const shardPitch = label + (many ? 12 : 19);
  const lossTop = islands.length * pitch + shards.length * shardPitch + GAP;
  const { loss: losses, heldout } = status.curves;
  const lossHeight =
    heldout.length || Object.values(losses).some((each) => each.length) ? LOSS_HEIGHT : 40;
  const bottom = lossTop + lossHeight;
  const height = bottom + AXIS;
  const end = Math.max(1, status.seconds);
  const x = (seconds) => left + (Math.min(seconds, end) / end) * (width - left - RIGHT);
  const rows = new Map();
  islands.forEach((lane, i) =>
    rows.set(lane.role, { lane, top: i * pitch + label, bar, strip, label }),
  );
  const below = islands.length * pitch + 4;
  shards.forEach((lane, i) =>
    rows.set(lane.role, {
      lane,
      top: below + i * shardPitch + label,
      bar: many ? 6 : 8,
      strip: 0,
      label,
    }),
  );
  return { status, width, height, bottom, left, x, end, rows, lossTop, lossHeight, narrow, many };
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
  for (let t = 0; t <= end; t += step) {
    parts.push(svg("line", { class: "grid", x1: x(t), x2: x(t), y1: 0, y2: bottom }));
    if (x(t) < width - 50)
      parts.push(
        svg(
          "text",
          { x: x(t), y: height - 6, "text-anchor": t && x(t) > 14 ? "middle" : "start" },
          clockTime(t),
        ),
      );
  }
  parts.push(svg("text", { x: width - RIGHT, y: height - 6, "text-anchor": "end" }, "min:s"));
  parts.push(
    svg("line", {
      class: "axis",
      x1: left,
      x2: width - RIGHT,
      y1: bottom,
      y2: bottom,
    }),
  );
  return parts;
}

function curves({ status, x, left, lossTop, lossHeight, width, narrow }) {
  const { loss: losses, heldout, width_seconds: bin } = status.curves;
  const values = [...Object.values(losses).flat(), ...heldout.map(([, value]) => value)].filter(
    (value) => value !== null,
  );
  if (!values.length)
    return [svg("text", { x: left, y: lossTop + 18 }, "The loss is not known yet.")];
  let low = Math.min(...values),
    high = Math.max(...values);
  if (high - low < 1e-3) [low, high] = [low - 0.5, high + 0.5];
  const step = niceStep(high - low, 5, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]);
  [low, high] = [Math.floor(low / step) * step, Math.ceil(high / step) * step];
  const y = (value) => lossTop + lossHeight - ((value - low) / (high - low)) * lossHeight;
  const parts = [];
  for (let i = 0; low + i * step <= high + 1e-9; i++) {
    const value = low + i * step,
      digits = step < 0.1 ? 2 : 1;
    parts.push(
      svg("line", { class: "grid", x1: left, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    );
    parts.push(
      svg(
        "text",
        {
          x: narrow ? 0 : left - 10,
          y: y(value) + (narrow ? -3 : 4),
          "text-anchor": narrow ? "start" : "end",
        },
        value.toFixed(digits),
      ),
    );
  }
  if (!narrow)
    parts.push(
      svg(
        "text",
        { x: 0, y: lossTop + 4 },
        svg("tspan", { class: "name" }, "Loss"),
        svg("tspan", { x: 0, dy: 16 }, "nats per token"),
      ),
    );
  for (const island of status.islands) {
    const line = path(
      (losses[island.number] ?? []).map((value, i) =>
        value === null ? null : [x((i + 0.5) * bin), y(value)],
      ),
    );
    parts.push(
      svg(
        "g",
        { class: "island", "--colour": island.colour },
        svg("path", { class: "curve", d: line }),
      ),
    );
  }
  if (heldout.length) {
    const points = heldout.map(([time, value]) => [x(time), y(value)]);
    parts.push(svg("path", { class: "heldout", d: path(points) }));
    const [px, py] = points.at(-1);
    parts.push(svg("circle", { class: "dot", cx: px, cy: py, r: 4 }));
  }
  return parts;
}

/** A line through the points; short gaps (null) are bridged, long ones are not. */
function path(points, longest = 6) {
  let text = "",
    gap = longest + 1;
  for (const point of points) {
    if (point === null) {
      gap += 1;
      continue;
    }
    text += `${gap > longest ? "M" : "L"}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    gap = 0;
  }
  return text;
}

// --- the cursor ---------------------------------------------------------------------------------

function moveTo(seconds) {
  cursor = seconds;
  if (!shown) return;
  const { status, line, x, end } = shown;
  if (cursor === null) {
    line.setAttribute("visibility", "hidden");
    byId("readout").replaceChildren("Point at the chart, or focus it and use the arrow keys.");
    return;
  }
  cursor = Math.min(end, Math.max(0, cursor));
  for (const name of ["x1", "x2"]) line.setAttribute(name, x(cursor));
  line.setAttribute("visibility", "visible");
  byId("readout").replaceChildren(...readout(status, cursor));
}

function readout(status, at) {
  const bin = Math.floor(at / status.curves.width_seconds);
  const parts = [html("b", null, clockTime(at))];
  for (const lane of status.timeline.lanes.filter((each) => each.role.startsWith("learner"))) {
    const number = lane.role.split("-")[1];
    const state = lane.spans.find(([start, end]) => start <= at && at <= end)?.[2] ?? "not there";
    const value = status.curves.loss[number]?.[bin],
      share = status.curves.participation[number]?.[bin];
    const more = [
      state,
      value ? `loss ${loss(value)}` : "",
      typeof share === "number" ? `in ${percent(share)} of commits` : "",
    ];
    parts.push(" · ", html("b", null, lane.name), " ", more.filter(Boolean).join(", "));
  }
  const before = status.curves.heldout.filter(([time]) => time <= at).at(-1);
  if (before) parts.push(" · ", html("b", null, "held-out"), ` ${loss(before[1])}`);
  return parts;
}

export function listen() {
  const box = byId("chart");
  box.addEventListener("pointermove", (event) => {
    if (!shown) return;
    const { left, width, end } = shown,
      at = event.clientX - box.getBoundingClientRect().left;
    moveTo(at < left ? null : ((at - left) / (width - left - RIGHT)) * end);
  });
  box.addEventListener("pointerleave", () => moveTo(null));
  box.addEventListener("blur", () => moveTo(null));
  box.addEventListener("keydown", (event) => {
    if (!shown) return;
    const step = Math.max(shown.status.curves.width_seconds, shown.end / 100),
      now = cursor ?? shown.end;
    const to = {
      ArrowLeft: now - step,
      ArrowRight: now + step,
      PageUp: now - 10 * step,
      PageDown: now + 10 * step,
      Home: 0,
      End: shown.end,
      Escape: null,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    moveTo(to);
  });
  new ResizeObserver(
    () => shown && shown.width !== Math.max(260, box.clientWidth) && drawChart(shown.status),
  ).observe(box);
}
