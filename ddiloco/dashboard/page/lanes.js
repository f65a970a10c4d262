// What each island and shard was doing, a row for each.

import { clockTime, compact, loss, svg } from "./format.js";

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
  const { status, x, left, rows } = layout;
  return [...rows.values()].map((row) => {
    const number = Number(row.lane.role.split("-")[1]);
    const island = row.lane.role.startsWith("learner")
      ? status.islands.find((each) => each.number === number)
      : null;
    const group = svg("g", { class: island ? "island" : "", "--colour": island?.colour });
    group.append(
      svg("rect", {
        class: "lane",
        x: left,
        y: row.top,
        width: x(layout.end) - left,
        height: row.bar,
        rx: 2,
      }),
    );
    for (const [start, end, state] of row.lane.spans)
      group.append(span(layout, row, start, end, state, number, island));
    group.append(
      ...(island ? strip(layout, row, number) : commits(layout, row, number)),
      ...names(layout, row, island, number),
    );
    return group;
  });
}

function span({ x }, row, start, end, state, number, island) {
  const box = {
    x: x(start),
    y: row.top,
    width: Math.max(0.75, x(end) - x(start)),
    height: row.bar,
    rx: 1.5,
  };
  const title = svg("title", null, `${row.lane.name}: ${state}, ${clockTime(start)} to ${clockTime(end)}`);
  if (state === "down") return svg("rect", { ...box, class: "down" }, title);
  if (!island)
    return svg(
      "rect",
      { ...box, class: "shard", opacity: state === "running" ? 0.35 : 0.15 },
      title,
    );
  if (state === "running") return svg("rect", { ...box, class: "fill" }, title);
  if (state === "joining") return svg("rect", { ...box, class: "fill", opacity: 0.28 }, title);
  return svg("rect", { ...box, fill: `url(#hatch-${number})`, opacity: 0.85 }, title);
}

/** Under an island's lane: the share of commits that it took part in; the paler, the fewer. */
function strip({ status, x }, row, number) {
  const width = status.curves.width_seconds;
  return smooth(row.strip ? (status.curves.participation[number] ?? []) : []).flatMap((share, i) =>
    share === null
      ? []
      : [
          svg("rect", {
            class: "fill",
            x: x(i * width),
            y: row.top + row.bar + 2,
            width: Math.max(1, x((i + 1) * width) - x(i * width)),
            height: row.strip - 2,
            opacity: 0.12 + 0.88 * share,
          }),
        ],
  );
}

/** The mean over the bins around each: single commits are not the point. */
function smooth(values, around = 3) {
  const first = values.findIndex((value) => value !== null);
  return values.map((_, i) => {
    if (i < first) return null;
    const near = values
      .slice(Math.max(0, i - around), i + around + 1)
      .filter((value) => value !== null);
    return near.length ? near.reduce((a, b) => a + b, 0) / near.length : null;
  });
}

/** On a shard's lane: the more commits, the darker. */
function commits({ status, x }, row, number) {
  const counts = status.curves.commits[number] ?? [];
  const most = Math.max(1, ...counts),
    width = status.curves.width_seconds;
  return counts.flatMap((count, i) =>
    count
      ? [
          svg("rect", {
            class: "shard",
            x: x(i * width),
            y: row.top,
            width: Math.max(0.75, x((i + 1) * width) - x(i * width) - 0.25),
            height: row.bar,
            opacity: 0.25 + 0.65 * (count / most),
          }),
        ]
      : [],
  );
}

function names({ status, left, narrow, many }, row, island, number) {
  const shard = status.shards.find((each) => each.number === number);
  const more = island
    ? island.loss === null
      ? island.state
      : `${island.state} · ${loss(island.loss)}`
    : shard
      ? `${compact(shard.commits)} rounds`
      : "";
  const y = narrow ? row.top - 5 : row.top + row.bar / 2 + 4;
  const text = svg("text", {
    x: narrow ? 0 : left - 10,
    y,
    "text-anchor": narrow ? "start" : "end",
  });
  text.append(svg("tspan", { class: "name" }, row.lane.name));
  if (!many && more) text.append(svg("tspan", { dx: 8 }, more));
  return [text];
}
