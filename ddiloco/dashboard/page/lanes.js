// What each island and shard was doing, a row for each.

import { clockTime, compact, known, label, loss, mean, svg } from "./format.js";

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
        ? together(layout, row.top, row.bar, row.lane.spans, (state) => look(state, island))
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

/** Bars [start, end, kind] of one kind are one shape: together they may be tens of thousands. */
function together({ x }, top, height, bars, look) {
  const shapes = {};
  for (const [start, end, kind] of bars) {
    const width = Math.max(0.75, x(end) - x(start)).toFixed(2);
    const bar = `M${x(start).toFixed(2)} ${top}h${width}v${height}h-${width}z`;
    shapes[kind] = (shapes[kind] ?? "") + bar;
  }
  return Object.entries(shapes).map(([kind, d]) => svg("path", { d, ...look(kind) }));
}

function look(state, island) {
  if (state === "down") return { class: "down" };
  if (!island) return { class: "shard", opacity: state === "running" ? 0.35 : 0.15 };
  if (state === "running") return { class: "fill" };
  if (state === "joining") return { class: "fill", opacity: 0.28 };
  return { class: state, fill: `url(#hatch-${island.number})`, opacity: 0.85 };
}

const SHADES = 20;

/** Bars of the bins whose share is known, each with its shade. */
const shaded = (bin, shares) =>
  shares.flatMap((share, i) =>
    share === null ? [] : [[i * bin, (i + 1) * bin, Math.round(SHADES * share)]],
  );

/** Under an island's lane: the share of commits that it took part in; the paler, the fewer. */
function strip(layout, { top, bar, strip }, number) {
  const { participation, width_seconds: bin } = layout.status.curves;
  const bars = shaded(bin, smooth(strip ? (participation[number] ?? []) : []));
  const gap = layout.many ? 1 : 2;
  return together(layout, top + bar + gap, strip, bars, (shade) => ({
    class: "fill strip",
    opacity: 0.12 + (0.88 * shade) / SHADES,
  }));
}

/**
 * The mean over the bins around each: single commits are not the point. A bin has one only between
 * commits: before the first, after the last, and where there was no run, nothing is to be drawn.
 */
function smooth(values, around = 3) {
  const there = (from, to) => values.slice(Math.max(0, from), to).filter(known);
  return values.map((_, i) => {
    const [before, after] = [there(i - around, i + 1), there(i, i + around + 1)];
    return before.length && after.length ? mean(there(i - around, i + around + 1)) : null;
  });
}

/** On a shard's lane: the more commits, the darker. */
function commits(layout, { top, bar }, number) {
  const { commits, width_seconds: bin } = layout.status.curves;
  const counts = commits[number] ?? [];
  const most = Math.max(1, ...counts);
  const shares = counts.map((count) => (count ? count / most : null));
  return together(layout, top, bar, shaded(bin, shares), (shade) => ({
    class: "shard",
    opacity: 0.25 + (0.65 * shade) / SHADES,
  }));
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
