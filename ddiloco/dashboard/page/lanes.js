// What each island and shard was doing, a row for each.

import { clockTime, compact, label, loss, mean, svg } from "./format.js";

const rect = (x, y, width, height, more) => svg("rect", { x, y, width, height, ...more });

export function patterns(status) {
  const each = status.islands.map((island) =>
    svg(
      "pattern",
      {
        id: `hatch-${island.number}`,
        class: "island",
        "--colour": island.colour,
        width: 6,
        height: 6,
        patternUnits: "userSpaceOnUse",
        patternTransform: "rotate(45)",
      },
      svg("line", { class: "hatch", x1: 0, y1: 0, x2: 0, y2: 6, "stroke-width": 4 }),
    ),
  );
  return svg("defs", null, each);
}

export function lanes(layout) {
  const { status, x, left, end, rows } = layout;
  return [...rows.values()].map((row) => {
    const [kind, number] = row.lane.role.split("-");
    const member = (kind === "learner" ? status.islands : status.shards).find(
      (each) => each.number === Number(number),
    );
    const island = kind === "learner" ? member : null;
    return svg(
      "g",
      { class: island ? "island" : "", "--colour": island?.colour },
      rect(left, row.top, x(end) - left, row.bar, { class: "lane", rx: 2 }),
      layout.many
        ? together(layout, row, island)
        : row.lane.spans.map((each) => span(layout, row, island, ...each)),
      island ? strip(layout, row, number) : commits(layout, row, number),
      row.unnamed ? null : name(layout, row, island, member),
    );
  });
}

function span({ x }, row, island, start, end, state) {
  const width = Math.max(0.75, x(end) - x(start));
  const shape = rect(x(start), row.top, width, row.bar, { rx: 1.5, ...look(state, island) });
  const text = `${row.lane.name}: ${state}, ${clockTime(start)} to ${clockTime(end)}`;
  shape.append(svg("title", null, text));
  return shape;
}

/** Of many islands the spans that look alike are one shape: they may be tens of thousands. */
function together({ x }, row, island) {
  const shapes = {};
  for (const [start, end, state] of row.lane.spans) {
    const width = Math.max(0.75, x(end) - x(start)).toFixed(2);
    const bar = `M${x(start).toFixed(2)} ${row.top}h${width}v${row.bar}h-${width}z`;
    shapes[state] = (shapes[state] ?? "") + bar;
  }
  return Object.entries(shapes).map(([state, d]) => svg("path", { d, ...look(state, island) }));
}

function look(state, island) {
  if (state === "down") return { class: "down" };
  if (!island) return { class: "shard", opacity: state === "running" ? 0.35 : 0.15 };
  if (state === "running") return { class: "fill" };
  if (state === "joining") return { class: "fill", opacity: 0.28 };
  return { fill: `url(#hatch-${island.number})`, opacity: 0.85 };
}

/** Under an island's lane: the share of commits that it took part in; the paler, the fewer. */
function strip({ status, x }, row, number) {
  const bin = status.curves.width_seconds;
  const [top, height] = [row.top + row.bar + 2, row.strip - 2];
  return smooth(row.strip ? (status.curves.participation[number] ?? []) : []).map((share, i) => {
    if (share === null) return null;
    const width = Math.max(1, x((i + 1) * bin) - x(i * bin));
    return rect(x(i * bin), top, width, height, { class: "fill", opacity: 0.12 + 0.88 * share });
  });
}

/** The mean over the bins around each: single commits are not the point. */
function smooth(values, around = 3) {
  const first = values.findIndex((value) => value !== null);
  return values.map((_, i) => {
    const near = values.slice(Math.max(0, i - around), i + around + 1);
    const known = near.filter((value) => value !== null);
    return i >= first && known.length ? mean(known) : null;
  });
}

/** On a shard's lane: the more commits, the darker. */
function commits({ status, x }, row, number) {
  const counts = status.curves.commits[number] ?? [];
  const most = Math.max(1, ...counts),
    bin = status.curves.width_seconds;
  return counts.map((count, i) => {
    if (!count) return null;
    const width = Math.max(0.75, x((i + 1) * bin) - x(i * bin) - 0.25);
    const look = { class: "shard", opacity: 0.25 + 0.65 * (count / most) };
    return rect(x(i * bin), row.top, width, row.bar, look);
  });
}

function name({ left, narrow, many }, row, island, member) {
  const said = island
    ? `${island.state}${island.loss === null ? "" : ` · ${loss(island.loss)}`}`
    : `${member?.state === "stalled" ? "stalled · " : ""}${compact(member?.commits)} rounds`;
  const parts = [svg("tspan", { class: "name" }, row.lane.name)];
  if (!many) parts.push(svg("tspan", { dx: 8 }, said));
  return narrow
    ? label(0, row.top - 5, "start", parts)
    : label(left - 10, row.top + row.bar / 2 + 4, "end", parts);
}
