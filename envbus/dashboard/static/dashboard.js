// Shows what the server says: one event holds everything, so the page has no state of its own but the curves' points.
import { Chart, spark, drawSpark } from "./charts.js";
import { attribute, bar, element, fillBar, keyed, row, shape, text, useBar } from "./rows.js";

const SILENT_MS = 4000; // events come twice a second
const STATES = ["ready", "full", "lagging", "suspect", "loading", "draining", "failed", "gone"];
const MOODS = { gone: "bad", failed: "bad", suspect: "warn", lagging: "warn" };
const WORKING = ["ready", "full", "lagging", "suspect"];
const get = (id) => document.getElementById(id);

// ---- numbers

const whole = (value) => value.toLocaleString("en-US");
const rate = (value) => (value === null ? "–" : value >= 100 ? whole(Math.round(value)) : value.toFixed(1));
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

function span(seconds) {
  if (seconds === null) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

function memory(bytes) {
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : bytes ? `${Math.round(bytes / 1e6)} MB` : "–";
}

// ---- tiles

function tile(name, big, unit, sub, mood = "") {
  const node = get(`tile-${name}`);
  const place = node.querySelector(".big");
  if (place.dataset.shown !== big + unit) {
    place.dataset.shown = big + unit;
    place.replaceChildren(big, ...(unit ? [element("small", "", unit)] : []));
  }
  if (sub !== null) text(node.querySelector(".sub"), sub);
  node.dataset.mood = mood;
}

function showTiles(data, last) {
  const { totals } = data;
  const share = totals.slots ? totals.in_flight / totals.slots : 0;
  const slots = `${whole(totals.in_flight)} of ${whole(totals.slots)} slots in use`;
  tile("utilisation", totals.slots ? String(Math.round(share * 100)) : "–", totals.slots ? "%" : "", totals.slots ? slots : "no slots");
  fillBar(get("tile-utilisation").querySelector(".bar"), share);

  tile("rate", last ? rate(last[3] + last[4]) : "–", "/s", "rollouts that ended, over 5 s");

  const clients = totals.waiting_clients === 1 ? "1 client" : `${whole(totals.waiting_clients)} clients`;
  tile("waiting", whole(totals.waiting_jobs), "", totals.waiting_jobs ? `jobs of ${clients} in line` : "nobody waits");

  const ended = totals.done + totals.failed;
  const failed = ended ? (totals.failed / ended) * 100 : 0;
  const shown = totals.failed === 0 ? "0" : failed < 10 ? failed.toFixed(1) : String(Math.round(failed));
  const of = ended ? `${whole(totals.failed)} of ${whole(ended)} in 10 min` : "no rollout ended in 10 min";
  tile("failed", ended ? shown : "–", ended ? "%" : "", of, failed >= 20 ? "bad" : failed >= 2 ? "warn" : "");

  const count = (states) => states.reduce((sum, state) => sum + (totals.states[state] ?? 0), 0);
  const [working, all] = [count(WORKING), count(STATES)];
  const mood = count(["gone", "failed"]) ? "bad" : count(["suspect", "lagging"]) ? "warn" : "";
  tile("servers", all ? String(working) : "0", all && working < all ? ` of ${all}` : "", null, mood);
  const there = STATES.filter((state) => totals.states[state]);
  keyed(get("tile-servers").querySelector(".states"), there, (state) => state, makeStateCount, (node, state) => {
    text(node.lastChild, there.length > 3 ? `${totals.states[state]}` : `${totals.states[state]} ${state}`);
  });
}

function makeStateCount(state) {
  const node = element("span");
  node.append(shape(state), element("span"));
  return node;
}

// ---- tables and lists

function empty(id, message, code = "") {
  const node = get(id).querySelector(".empty");
  if (node.dataset.shown === message + code) return;
  node.dataset.shown = message + code;
  node.replaceChildren(message, ...(code ? [element("code", "", code)] : []));
}

function showUse(cell, used, slots) {
  const box = cell.firstChild;
  fillBar(box.firstChild, slots ? used / slots : 0);
  text(box.lastChild, `${used} / ${slots}`);
}

function makeEnv() {
  const node = row(8, { 0: "strong", 3: "n", 4: "n", 6: "n", 7: "n" });
  node.cells[1].append(element("div", "glyphs"), element("span", "caution"));
  useBar(node.cells[2]);
  node.cells[5].append(spark());
  return node;
}

function fillEnv(node, env, servers) {
  const cells = node.cells;
  const name = env.mixed.length ? `${env.env}  ≠` : env.env;
  text(cells[0], name);
  const mixed = env.mixed.length ? `\nits servers differ in: ${env.mixed.join(", ")}` : "";
  attribute(cells[0], "title", env.env + mixed + (env.problem ? `\n${env.problem}` : ""));
  const mine = servers.filter((server) => server.env === env.env);
  keyed(cells[1].firstChild, mine, (server) => server.server + server.state, (server) => shape(server.state), (glyph, server) => {
    text(glyph.lastChild, `${server.server.slice(0, 8)} on ${server.host}: ${server.state}`);
  });
  const there = mine.filter((server) => !["gone", "failed"].includes(server.state)).length;
  text(cells[1].lastChild, env.wanted === null || there === env.wanted ? "" : `${there} of ${env.wanted}`);
  showUse(cells[2], env.in_flight, env.slots);
  text(cells[3], env.waiting_jobs ? whole(env.waiting_jobs) : "–");
  text(cells[4], rate(env.rate));
  drawSpark(cells[5].firstChild, env.rates);
  text(cells[6], env.failed ? whole(env.failed) : "–");
  cells[6].classList.toggle("alarm", env.failed > 0);
  text(cells[7], env.reward === null ? "–" : env.reward.toFixed(2));
  node.className = env.problem || !mine.some((server) => WORKING.includes(server.state)) ? "bad" : env.mixed.length ? "warn" : "";
}

const SEVERITY = { failed: 0, gone: 0, suspect: 1, lagging: 2 };
const severity = (server) => SEVERITY[server.state] ?? 3;
const NUMBERS = [4, 5, 6, 7, 8]; // cells that make room for a server's problem

function makeServer() {
  const node = row(10, { 3: "mono", 5: "n", 6: "n", 7: "n", 8: "n", 9: "problem" });
  node.cells[9].colSpan = NUMBERS.length;
  node.cells[0].append(element("span", "state"));
  useBar(node.cells[4]);
  return node;
}

function fillServer(node, server) {
  const cells = node.cells;
  const state = cells[0].firstChild;
  const words = server.state === "suspect" && server.silent_s !== null ? `silent ${Math.round(server.silent_s)} s` : server.state;
  if (state.dataset.state !== server.state) {
    state.dataset.state = server.state;
    state.replaceChildren(shape(server.state), element("span"));
  }
  text(state.lastChild, words);
  attribute(node, "title", server.problem);
  for (const index of NUMBERS) cells[index].hidden = server.problem !== null;
  cells[9].hidden = server.problem === null;
  text(cells[9], server.problem ?? "");
  attribute(node, "data-server", server.server);
  text(cells[1], server.env);
  text(cells[2], server.host);
  text(cells[3], server.server.slice(0, 8));
  showUse(cells[4], server.in_flight, server.slots);
  text(cells[5], rate(server.rate));
  text(cells[6], span(server.lag_s));
  cells[6].classList.toggle("caution", server.state === "lagging");
  text(cells[7], memory(server.rss_bytes));
  text(cells[8], span(server.age_s));
  node.className = `${MOODS[server.state] ?? ""} ${server.state}`;
}

function showBars(id, items, key, name, value) {
  const most = Math.max(1, ...items.map(value));
  keyed(get(id).querySelector(".bars"), items, key, makeBar, (node, item) => {
    const [label, track, count] = node.children;
    text(label, name(item));
    attribute(label, "title", name(item));
    fillBar(track, value(item) / most);
    text(count, whole(value(item)));
  });
}

function makeBar() {
  const node = element("li");
  node.append(element("span"), bar(), element("span", "value"));
  return node;
}

function makeRecent() {
  const node = row(5, { 2: "mono", 3: "n" });
  const box = element("div", "reward");
  box.append(bar(), element("b"));
  node.cells[4].append(box, element("span", "alarm"));
  return node;
}

function fillRecent(node, seen) {
  const [ended, env, example, took, reward] = node.cells;
  text(ended, clock(seen.at));
  text(env, seen.env);
  text(example, seen.example_id);
  text(took, span(seen.duration_s));
  const [box, error] = reward.children;
  box.style.display = seen.error === null ? "" : "none";
  text(error, seen.error ?? "");
  fillBar(box.firstChild, seen.reward ?? 0);
  text(box.lastChild, seen.reward === null ? "–" : seen.reward.toFixed(2));
  attribute(node, "title", `server ${seen.server.slice(0, 8)}, client ${seen.client || "without an id"}`);
}

// ---- the whole

const points = new Map();
let charts = null;
let latest = null;

function makeCharts() {
  const none = "Curves begin when the first seconds have passed.";
  return [
    new Chart(get("chart-utilisation").querySelector(".plot"), [
      { name: "use", read: (point) => point[1], area: true },
      { name: "slots", read: (point) => point[2], area: false },
    ], { least: 4, none }),
    new Chart(get("chart-rate").querySelector(".plot"), [
      { name: "done", read: (point) => point[3] + point[4], area: true },
      { name: "failed", read: (point) => point[4], area: true },
    ], { least: 1, none }),
  ];
}

function show(data) {
  latest = data;
  for (const point of data.points) points.set(point[0], point);
  for (const at of points.keys()) if (at < data.at - 660) points.delete(at);
  const ordered = [...points.values()].sort((a, b) => a[0] - b[0]);
  showTiles(data, ordered.at(-1));
  charts ??= makeCharts();
  for (const chart of charts) chart.draw(ordered, Math.floor(data.at));
  text(get("where"), `${data.bus}${data.prefix === "env" ? "" : `, subjects ${data.prefix}.>`}`);

  keyed(get("envs").querySelector("tbody"), data.envs, (env) => env.env, makeEnv, (node, env) => fillEnv(node, env, data.servers));
  if (data.envs.length) empty("envs", "");
  else empty("envs", "No server has been heard on this bus. Start one: ", `envbus serve reverse-text --address ${data.bus}`);
  keyed(get("servers").querySelector("tbody"), [...data.servers].sort((a, b) => severity(a) - severity(b)), (server) => server.server, makeServer, fillServer);
  empty("servers", data.servers.length ? "" : "No servers.");
  text(get("more-servers"), data.more_servers ? `and ${whole(data.more_servers)} more` : "");
  showBars("clients", data.clients, (c) => c.client + c.env, (c) => `${c.client} · ${c.env}`, (c) => c.jobs);
  empty("clients", data.clients.length ? (data.more_clients ? `and ${whole(data.more_clients)} more` : "") : "Nobody waits.");
  showBars("failures", data.failures, (f) => f.type + f.env, (f) => `${f.type} · ${f.env}`, (f) => f.count);
  empty("failures", data.failures.length ? "" : "No failures.");
  keyed(get("recent").querySelector("tbody"), data.recent, (seen) => seen.number, makeRecent, fillRecent);
  empty("recent", data.recent.length ? "" : "None has ended since this dashboard started.");
  document.title = data.totals.slots ? `${Math.round((100 * data.totals.in_flight) / data.totals.slots)} % · envbus` : "envbus";
}

// ---- the connection

let heardAt = performance.now();

function showLink() {
  const lost = performance.now() - heardAt > SILENT_MS;
  const state = lost ? "lost" : latest === null ? "connecting" : latest.cut_off ? "cut-off" : "live";
  const words = { lost: "no connection", connecting: "connecting", "cut-off": "cut off", live: "live" };
  const link = get("link");
  attribute(link, "data-link", state);
  text(link.lastChild, words[state]);
  const stale = state === "lost" || state === "cut-off";
  document.body.classList.toggle("stale", stale && latest !== null);
  const banner = get("lost");
  banner.hidden = !stale;
  attribute(banner, "data-link", state);
  const since = latest === null ? "" : ` What is shown is as of ${clock(staleSince())}.`;
  text(banner, !stale ? "" : (state === "lost" ? "No connection to the dashboard's server; trying again." : "The dashboard's server is cut off from NATS; it tries again.") + since);
  text(get("clock"), clock(Date.now() / 1000));
}

let cutOffAt = null;

function staleSince() {
  return cutOffAt ?? latest.at;
}

function connect() {
  const source = new EventSource("/events");
  source.onmessage = (message) => {
    const data = JSON.parse(message.data);
    heardAt = performance.now();
    cutOffAt = data.cut_off ? (cutOffAt ?? data.at) : null;
    show(data);
    showLink();
  };
  source.onerror = () => {
    // The browser tries again by itself, unless it was told not to.
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
    heardAt = Math.min(heardAt, performance.now() - SILENT_MS + 500);
  };
}

function chooseTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

const light = matchMedia("(prefers-color-scheme: light)");
chooseTheme(localStorage.getItem("theme") ?? (light.matches ? "light" : "dark"));
light.addEventListener("change", () => localStorage.getItem("theme") ?? chooseTheme(light.matches ? "light" : "dark"));
get("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", theme);
  chooseTheme(theme);
});
setInterval(showLink, 250);
connect();
