// Numbers as people read them, and elements without innerHTML: what is in a log stays text.

export const DASH = "–";
export const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Only all of it is 100%: 99.7% are 99%. */
export function percent(share, digits = 0) {
  const most = share < 1 ? 100 - 10 ** -digits : 100;
  return known(share) ? `${Math.min(100 * share, most).toFixed(digits)}%` : DASH;
}

/** With three decimals, below 0.1 with three significant digits. */
export function loss(value) {
  if (!known(value)) return DASH;
  return Math.abs(value) >= 0.1 ? value.toFixed(3) : value.toPrecision(3);
}
export const cosine = (value) => (known(value) ? value.toFixed(2) : DASH);

export function compact(value) {
  if (!known(value)) return DASH;
  for (const [limit, unit] of [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (Math.abs(value) >= 0.9995 * limit) {
      const scaled = value / limit;
      return (Math.abs(scaled) >= 99.95 ? scaled.toFixed(0) : scaled.toFixed(1)) + unit;
    }
  }
  return value.toFixed(0);
}

export const bytes = (value) =>
  known(value) ? `${compact(value)}B`.replace(/(\d)B/, "$1 B").replace(/([kMGT])B/, " $1B") : DASH;

export function clockTime(seconds) {
  if (!known(seconds)) return DASH;
  const whole = Math.floor(Math.max(0, seconds));
  const [d, h] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24];
  const [m, s] = [Math.floor(whole / 60) % 60, whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  const day = d ? `${d} d ` : "";
  return d || h ? `${day}${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

/** What the parts of such a time are. */
export const timeUnit = (seconds) => (seconds < 3600 ? "min:s" : "h:min:s");

export const sum = (values) => values.reduce((a, b) => a + b, 0);
export const mean = (values) => sum(values) / values.length;

/** Of numbers in any order; of an even count the mean of the middle two. */
export function median(values) {
  const ordered = [...values].sort((a, b) => a - b);
  const middle = (ordered.length - 1) / 2;
  return (ordered[Math.floor(middle)] + ordered[Math.ceil(middle)]) / 2;
}

export const plural = (n, word, many = `${word}s`) => `${n} ${n === 1 ? word : many}`;

export function join(words) {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

/** Which islands (or shards), or of more than six how many. */
export const numbered = (numbers, what = "island") =>
  numbers.length > 6
    ? plural(numbers.length, what)
    : `${what}${numbers.length > 1 ? "s" : ""} ${join(numbers)}`;

function make(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === false || value === null) continue;
    if (name.startsWith("--") || name === "width%")
      node.style.setProperty(name === "width%" ? "width" : name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(
    ...children.flat().filter((each) => each !== null && each !== undefined && each !== ""),
  );
  return node;
}

export const html = (tag, attributes, ...children) =>
  make(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) =>
  make(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// Shapes of a picture. `more`: further attributes.
export const line = (kind, x1, x2, y1, y2, more) =>
  svg("line", { class: kind, x1, x2, y1, y2, ...more });
export const label = (x, y, anchor, ...children) =>
  svg("text", { x, y, "text-anchor": anchor }, ...children);

/** A row for each item. A column is [name, what an item's cell has, kind], "row" for its head. */
export function table(items, columns) {
  const head = columns.map(([name, , kind]) =>
    html("th", { scope: "col", class: kind === "number" && kind }, name),
  );
  const cell = ([, of, kind], item, i) =>
    kind === "row"
      ? html("th", { scope: "row" }, of(item, i))
      : html("td", { class: kind }, of(item, i));
  const rows = items.map((item, i) =>
    html("tr", null, columns.map((column) => cell(column, item, i))),
  );
  const top = html("thead", null, html("tr", null, head));
  return html("table", null, top, html("tbody", null, rows));
}

/** A bar of colours: `parts` are [name, share, attributes], in order. */
export const stack = (attributes, parts) =>
  html(
    "div",
    { role: "img", ...attributes },
    parts.map(([title, share, more]) => html("i", { ...more, "width%": percent(share, 2), title })),
  );

export const meter = (share) =>
  html("span", { class: "meter" }, html("i", { "width%": percent(share, 1) }));

export const byId = (id) => document.getElementById(id);

/**
 * Shows these nodes in a box, in place of those before. What stays the same is not touched: it is not
 * laid out anew, and what a reader has selected or points at stays.
 */
export const put = (box, ...nodes) => become(box, html("div", null, nodes));

function become(box, next) {
  let [old, node] = [box.firstChild, next.firstChild];
  while (old || node) {
    const following = [old?.nextSibling, node?.nextSibling];
    if (!node) old.remove();
    else if (!old) box.append(node);
    else if (!old.isEqualNode(node)) looksLike(old, node) ? become(old, node) : old.replaceWith(node);
    [old, node] = following;
  }
}

/** Whether two nodes are elements that can only differ in what they hold. */
function looksLike({ nodeName, attributes }, node) {
  if (!attributes || nodeName !== node.nodeName || attributes.length !== node.attributes.length)
    return false;
  for (const { name, value } of attributes) if (node.getAttribute(name) !== value) return false;
  return true;
}

/** Sets text only where it changed, so that nothing is announced or selected anew. */
export function say(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
  node.hidden = false;
}

/**
 * Moves a cursor in a box by mouse and keyboard; `move(null)` removes it. `at(x, y)` says what is
 * at these pixels, `keys()` where each key leads.
 */
export function listen(box, move, at, keys) {
  box.addEventListener("pointermove", (event) => {
    const { left, top } = box.getBoundingClientRect();
    move(at(event.clientX - left, event.clientY - top));
  });
  box.addEventListener("pointerleave", () => move(null));
  box.addEventListener("blur", () => move(null));
  box.addEventListener("keydown", (event) => {
    const to = { ...keys(), Escape: null }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    move(to);
  });
}
