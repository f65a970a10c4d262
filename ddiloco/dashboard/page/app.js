// Polls api/status about once a second and shows it; says when the run is over or the server gone.

import { byId, clockTime, compact, join, percent, say } from "./format.js";
import { drawChart, listenToChart } from "./chart.js";
import { drawHeat, listenToHeat, redrawHeat } from "./heat.js";
import { drawPanels } from "./panels.js";
import { listenForFaults, showFaults } from "./faults.js";

const DELAY_MS = { silent: 5000, over: 5000 };
const PATIENCE_MS = 8000,
  HIDDEN_MS = 5000,
  LONGEST_MS = 10000,
  KEY = "ddiloco-token";
const PILL = { empty: "nothing to show yet", gone: "server gone" }; // of other phases: their names
let last = null; // {status, text, at}
let drawn = ""; // the text of the status that the page shows
let failures = 0;
let cost = 0; // milliseconds of the last drawing; at most a tenth of the time goes into drawing

// --- the token: once in the url, then kept by this tab ------------------------------------------

// Where the browser blocks its storage, both the token and the theme are forgotten with the page.
function kept(storage, key) {
  try {
    return window[storage].getItem(key);
  } catch {
    return null;
  }
}

function keep(storage, key, value) {
  try {
    window[storage].setItem(key, value);
  } catch {} // it is blocked
}

let token = kept("sessionStorage", KEY);
const query = new URLSearchParams(location.search);
if (query.has("token")) {
  setToken(query.get("token"));
  query.delete("token");
  const rest = query.size ? `?${query}` : "";
  history.replaceState(null, "", location.pathname + rest + location.hash);
}

function setToken(given) {
  token = given;
  keep("sessionStorage", KEY, given);
}

export function authorized(headers = {}) {
  const sent = token?.replace(/[^!-~]/g, "?"); // no header takes others
  return sent ? { ...headers, Authorization: `Bearer ${sent}` } : headers;
}

function askForToken() {
  byId("token-wrong").hidden = !token;
  byId("token-form").hidden = false;
  byId("main").hidden = true;
  drawn = "";
  banner("");
  byId("phase").textContent = "locked";
  byId("token").focus();
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken(byId("token").value.trim());
  byId("token-form").hidden = true;
  poll();
});

// --- polling ------------------------------------------------------------------------------------

async function poll() {
  let delay;
  try {
    const answer = await fetch("api/status", {
      headers: authorized(),
      cache: "no-store",
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
    if (answer.status === 401) return askForToken();
    if (!answer.ok) throw new Error(`it answered ${answer.status}`);
    const text = await answer.text();
    last = { status: JSON.parse(text), text, at: new Date() };
    failures = 0;
    delay = Math.max(DELAY_MS[last.status.phase] ?? 1000, Math.min(LONGEST_MS, 10 * cost));
  } catch {
    failures += 1;
    delay = Math.min(LONGEST_MS, 1000 * 2 ** Math.min(failures - 1, 4));
  }
  setTimeout(poll, document.hidden ? Math.max(delay, HIDDEN_MS) : delay);
  show(); // last: an error in it ends no polling
}

function show() {
  const gone = failures > 1 || (failures && !last);
  const phase = gone ? "gone" : (last?.status.phase ?? "loading");
  document.body.dataset.phase = phase;
  byId("phase").textContent = PILL[phase] ?? phase;
  if (gone) banner(goneText(), "bad");
  else if (last) banner(...message(last.status));
  if (!last) return;
  const how = { gone: PILL.gone, silent: "silent" }[phase] ?? percent(last.status.progress);
  document.title = `${how} ${last.status.name} · ddiloco`; // all that is seen of a page behind others
  if (failures) return;
  say("as-of", `As of ${last.at.toLocaleTimeString()}.`);
  if (document.hidden) return;
  const began = performance.now();
  if (last.text !== drawn) draw(last.status); // of a run that is over nothing changes
  drawn = last.text;
  cost = performance.now() - began;
}

document.addEventListener("visibilitychange", () => byId("token-form").hidden && show());

function goneText() {
  const since = last ? `since ${last.at.toLocaleTimeString()}. What you see is from then` : "";
  const over = last?.status.phase === "over";
  const hint = over
    ? "The run was over; `ddiloco dashboard --workdir=…` shows it again."
    : "The run itself may well go on; this page tries again by itself.";
  return `The server does not answer ${since}. ${hint}`.replace(" .", ".");
}

function message(status) {
  const odd = status.odd_events
    ? `${compact(status.odd_events)} events of its log could not be read.`
    : "";
  const logs = status.unread.slice(0, 3);
  if (status.unread.length > 3) logs.push(`${status.unread.length - 3} more`);
  const unread = logs.length
    ? `Of some roles nothing new is known, since their logs cannot be read: ${join(logs)}.`
    : "";
  const clocks = status.clocks
    ? `Clocks differ, and so do times of different roles: ${status.clocks}.`
    : "";
  const running = status.phase === "running";
  const tone = running || status.phase === "silent" || /failed/.test(status.text) ? "warn" : "plain";
  const said = [running ? status.solo : status.text, unread, clocks, odd];
  return [said.filter(Boolean).join(" "), tone];
}

function banner(text, tone = "plain") {
  const node = byId("banner");
  node.hidden = !text;
  node.dataset.tone = tone;
  if (node.textContent !== text) node.textContent = text;
}

// --- drawing ------------------------------------------------------------------------------------

function draw(status) {
  byId("name").textContent = status.name;
  const empty = status.phase === "empty";
  byId("main").hidden = empty;
  byId("progress").hidden = empty || !status.total_tokens;
  for (const id of ["as-json", "as-metrics"])
    byId(id).hidden = Boolean(token); // a link sends no token
  if (empty) return say("elapsed", "");
  const left = status.seconds_left === null ? "" : ` · about ${clockTime(status.seconds_left)} left`;
  say("elapsed", `${clockTime(status.seconds)} ${status.phase === "over" ? "long" : "elapsed"}${left}`);
  const tokens = `${compact(status.tokens_done)} of ${compact(status.total_tokens)} tokens`;
  const verb = status.merging ? "merged" : "trained";
  say("tokens", `${percent(status.progress)} · ${tokens} ${verb}`);
  const track = document.querySelector(".track");
  track.setAttribute("aria-valuenow", parseInt(percent(status.progress)));
  track.firstElementChild.style.width = percent(status.progress, 1);
  drawChart(status);
  drawHeat(status);
  drawPanels(status);
  showFaults(status);
}

// --- light and dark -----------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];

function theme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = `Theme: ${name}`;
  keep("localStorage", "ddiloco-theme", name);
  redrawHeat();
}

byId("theme").addEventListener("click", () =>
  theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % 3]),
);
const chosen = kept("localStorage", "ddiloco-theme");
theme(THEMES.includes(chosen) ? chosen : "system");

listenToChart();
listenToHeat();
listenForFaults(authorized);
poll();
