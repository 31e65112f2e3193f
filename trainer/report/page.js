"use strict";
// Draws the document of read_results.py: text, filter, colors, tables and the page; charts.js has the charts.
// All parts of the page show the rows that visibleRows() returns.

const find = (id) => document.getElementById(id);
const state = {hidden: new Set(), sort: {}, plotly: false};
let report = null;

// ---- text

const SYMBOLS = [["circle", "●"], ["square", "■"], ["diamond", "◆"], ["triangle-up", "▲"],
                 ["triangle-down", "▼"], ["cross", "✚"], ["x", "✖"], ["star", "★"], ["hexagon", "⬢"]];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const PART_NAMES = {data: "data", forward: "forward", backward: "backward",
                    exposed_comm: "waiting for communication", optimizer: "optimizer", other: "other"};
const MOST_CURVES = 40, MOST_LINES = 12, MOST_BENCH_ROWS = 500;

const known = (value) => value !== null && value !== undefined;
const fixed = (value, digits) => known(value) ? value.toFixed(digits) : "–";
const percent = (value) => known(value) ? (100 * value).toFixed(2) + " %" : "–";
const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");
const significant = (value) => !known(value) ? "–"
  : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en-US") : String(+value.toPrecision(4));

function humanBytes(value) {
  if (!known(value)) return "–";
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= size) return +(value / size).toPrecision(3) + " " + unit;
  }
  return Math.round(value) + " B";
}

const withSpread = (text, spread, digits, scale = 1) =>
  known(spread) ? `${text} ± ${(scale * spread).toFixed(digits)}` : text;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// ---- rows, filter, colors

// Assigns colors and symbols, one per row if there are few rows, otherwise one per method. Returns the rows of
// each group that shares a color.
function assignStyles(rows) {
  const few = rows.length <= 8;
  const groups = new Map();
  for (const row of rows) {
    row.group = few ? row.label : row.compression.split(":")[0];
    if (!groups.has(row.group)) groups.set(row.group, []);
    groups.get(row.group).push(row);
  }
  [...groups.values()].forEach((members, at) => members.forEach((row, index) => {
    row.color = at % 8;
    row.symbol = SYMBOLS[at % SYMBOLS.length];
    row.dash = DASHES[(few ? at : index) % DASHES.length];
  }));
  return groups;
}

// All words of the filter must occur; -word excludes.
function matches(text) {
  const lower = text.toLowerCase();
  return find("filter").value.toLowerCase().split(/\s+/).filter(Boolean).every(
    (word) => word.length > 1 && word[0] === "-" ? !lower.includes(word.slice(1)) : lower.includes(word));
}

const visibleRows = () => report.rows.filter((row) => matches(row.label) && !state.hidden.has(row.group));
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const rowColor = (row) => color("c" + row.color);

function seedsOf(rows) {
  return rows.flatMap((row) => row.seeds.filter((seed) => known(seed.run)).map((seed) => ({
    row, run: report.runs[seed.run],
    name: row.seeds.length > 1 ? `${row.label}, seed ${seed.seed}` : row.label
  })));
}

// ---- tables

// columns: {key, title, text(row), value(row): to sort by, left: of text}. A click on a title sorts.
function drawTable(id, columns, rows, mostRows = Infinity) {
  const sort = state.sort[id];
  const column = sort && columns.find((c) => c.key === sort.key);
  const value = (row) => column.value ? column.value(row) : row[column.key];
  if (column) {
    rows = [...rows].sort((one, other) => {
      const a = value(one), b = value(other);
      if (!known(a) || !known(b)) return known(b) - known(a);
      return sort.direction * (typeof a === "number" && typeof b === "number" ? a - b
        : String(a).localeCompare(String(b), "en", {numeric: true}));
    });
  }
  const heads = columns.map((c) => element("th", {
    scope: "col", class: c.left ? "text" : "",
    ...(column === c ? {"aria-sort": sort.direction > 0 ? "ascending" : "descending"} : {})
  }, element("button", {type: "button", onclick: () => {
    const same = sort && sort.key === c.key;
    state.sort[id] = {key: c.key, direction: same ? -sort.direction : c.left ? 1 : c.first || 1};
    drawTable(id, columns, rows, mostRows);
    [...find(id).querySelectorAll("th button")][columns.indexOf(c)].focus();
  }}, c.title)));
  const text = (c, row) => c.text ? c.text(row) : String(row[c.key] ?? "–");
  const body = rows.slice(0, mostRows).map((row) => element("tr", {}, ...columns.map(
    (c) => element("td", c.left ? {class: "text", title: text(c, row)} : {}, text(c, row)))));
  find(id).replaceChildren(element("table", {}, element("thead", {}, element("tr", {}, ...heads)),
                                   element("tbody", {}, ...body)));
  find(id).tabIndex = 0;  // scrolls by keyboard
}

function drawResults() {
  const perSeed = find("rows-by").value === "seed";
  const rows = visibleRows();
  const differs = (key) => new Set(rows.map((row) => row[key])).size > 1;
  const number = (key, title, text, first) => ({key, title, text: (row) => text(row[key]), first});
  const columns = [{key: "label", title: "Spec", left: true}];
  if (perSeed) columns.push({key: "seed", title: "Seed"});
  columns.push(
    {key: "accuracy", title: "Test accuracy", first: -1,
     text: (row) => withSpread(percent(row.accuracy), row.accuracy_std, 2, 100)},
    {key: "loss", title: "Loss", text: (row) => withSpread(fixed(row.loss, 4), row.loss_std, 4)},
    number("wire_bytes", "Sent per step", humanBytes), number("bytes_per_element", "Sent per element", (v) => `${significant(v)} B`),
    number("ratio", "Ratio", (v) => known(v) ? v.toFixed(2) + "x" : "–", -1),
    number("step_ms", "Step ms", (v) => fixed(v, 2)),
    number("exposed_comm_ms", "Exposed comm. ms", (v) => fixed(v, 2)),
    number("images_per_s", "Images/s", significant, -1));
  const target = !perSeed && rows.length && targetOf(rows);
  if (target) {
    columns.push(number("seconds_to_target", `Time to ${significant(100 * target)} %`,
                        (v) => known(v) ? `${fixed(v, 1)} s` : "–"),
                 {key: "speedup", title: "Speedup", first: -1, value: (row) => speedup(row, rows),
                  text: (row) => known(speedup(row, rows)) ? `${speedup(row, rows).toFixed(1)}x` : "–"});
  }
  if (!perSeed && rows.some((row) => row.seeds.length > 1)) {
    columns.push({key: "count", title: "Seeds", value: (row) => row.seeds.length,
                  text: (row) => String(row.seeds.length)});
  }
  for (const [key, title] of [["schedule", "Schedule"], ["ranks", "Ranks"], ["device", "Device"],
                              ["link", "Link"], ["bucket_mb", "Bucket MiB"]]) {
    if (differs(key)) columns.push({key, title});
  }
  const own = ["step_ms", "images_per_s", "wire_bytes", "exposed_comm_ms"];
  drawTable("results", columns, !perSeed ? rows : rows.flatMap((row) => row.seeds.map((seed) => {
    const run = known(seed.run) ? report.runs[seed.run] : {};
    return {...row, ...Object.fromEntries(own.map((key) => [key, run[key] ?? row[key]])), seed: seed.seed,
            accuracy: seed.accuracy, loss: seed.loss, accuracy_std: null, loss_std: null};
  })));
}

function flattened(config) {
  return Object.fromEntries(Object.entries(config).flatMap(([key, value]) =>
    value && typeof value === "object" && !Array.isArray(value)
      ? Object.entries(value).map(([inner, v]) => [`${key}.${inner}`, v])
      : [[key, Array.isArray(value) ? [...new Set(value)].join(", ") : value]]));
}

function drawConfig() {
  const runs = seedsOf(visibleRows()).map(({run, name}) => ({name, log: run.log, ...flattened(run.config)}));
  const keys = [...new Set(runs.flatMap(Object.keys))].filter((key) => key !== "name" && key !== "log");
  const text = (value) => typeof value === "number" && !Number.isInteger(value)
    ? String(+value.toPrecision(4)) : known(value) ? String(value) : "–";
  const differ = keys.filter((key) => new Set(runs.map((run) => text(run[key]))).size > 1);
  const same = keys.filter((key) => !differ.includes(key));
  drawTable("config-differs", [
    {key: "name", title: "Run", left: true}, {key: "log", title: "Log", left: true},
    ...differ.map((key) => ({key, title: key, left: true, text: (run) => text(run[key])}))
  ], runs);
  drawTable("config-same", [{key: "key", title: "Setting", left: true},
    {key: "value", title: "Value", left: true}],
    same.map((key) => ({key, value: text(runs[0][key])})));
}

function drawBench(bench, at) {
  const rows = bench.rows.filter((row) => matches(row.label));
  drawTable(`bench-table-${at}`, [{key: "label", title: "Case", left: true}, ...bench.columns.map((key) => ({
    key, title: key, left: bench.rows.some((row) => typeof row[key] === "string"),
    text: (row) => typeof row[key] === "number" ? significant(row[key]) : String(row[key] ?? "–")
  }))], rows, MOST_BENCH_ROWS);
  find(`bench-count-${at}`).textContent = rows.length > MOST_BENCH_ROWS ?
    `The first ${MOST_BENCH_ROWS} of ${rows.length} rows; filter to see others.` : "";
  if (!bench.x) return;
  const cases = [...new Set(rows.map((row) => row.label))];
  const traces = cases.slice(0, MOST_LINES).map((name, index) => {
    const some = rows.filter((row) => row.label === name && row[bench.x] > 0 && row[bench.y] > 0)
      .sort((a, b) => a[bench.x] - b[bench.x]);
    return {x: some.map((row) => row[bench.x]), y: some.map((row) => row[bench.y]), mode: "lines+markers",
            name, line: {color: color("c" + index % 8), dash: DASHES[index % 5]},
            marker: {symbol: SYMBOLS[index % SYMBOLS.length][0], size: 8},
            hovertemplate: `<b>${escaped(name)}</b><br>${bench.y} %{y:.4~g}<br>` +
                           `${bench.x} %{x:.4~s}<extra></extra>`};
  }).filter((trace) => trace.x.length);
  const axis = (key, most, values) => logAxis(Math.min(...values) / 1.1, Math.max(...values) * 1.1, most,
                                              key.endsWith("bytes") ? humanBytes : significant, key);
  draw(`bench-chart-${at}`, traces, traces.length ? {
    xaxis: axis(bench.x, find(`bench-chart-${at}`).clientWidth / 90, traces.flatMap((trace) => trace.x)),
    yaxis: axis(bench.y, 10, traces.flatMap((trace) => trace.y))
  } : {}, "No case in this selection has values.");
  find(`bench-hint-${at}`).textContent = cases.length > MOST_LINES ?
    `The first ${MOST_LINES} of ${cases.length} cases; filter to see others.` : "";
}

// ---- the page

// Returns the accuracy of compare --target-accuracy, if all rows have the same; otherwise undefined.
function targetOf(rows) {
  const targets = new Set(rows.map((row) => row.target_accuracy));
  return targets.size === 1 && known([...targets][0]) ? [...targets][0] : undefined;
}

// Returns the speedup of a row's time to the target over fp32's, or null.
function speedup(row, rows) {
  const fp32 = rows.find((one) => one.compression === "fp32" && one.link === row.link);
  return fp32 && fp32.seconds_to_target && row.seconds_to_target
    ? fp32.seconds_to_target / row.seconds_to_target : null;
}

function drawCards() {
  const rows = visibleRows().filter((row) => known(row.accuracy));
  if (!rows.length) return find("cards").replaceChildren();
  const least = (some, key) => some.filter((row) => row[key] > 0)
    .reduce((a, b) => a && a[key] <= b[key] ? a : b, null);
  const best = rows.reduce((a, b) => a.accuracy >= b.accuracy ? a : b);
  const near = rows.filter((row) => row.accuracy >= best.accuracy - 0.005);
  const first = targetOf(rows) && least(rows, "seconds_to_target"), times = first && speedup(first, rows);
  const cards = new Map();  // a row's titles
  for (const [title, row] of [["Most accurate", best],
                              ["Fewest bytes within 0.5 points", least(near, "wire_bytes")],
                              ["Fastest step within 0.5 points", least(near, "step_ms")]]) {
    if (row) cards.set(row, [...(cards.get(row) || []), title]);
  }
  const card = (title, label, text) => element("div", {}, element("dl", {}, element("dt", {}, title),
    element("dd", {}, label), element("dd", {}, text)));
  find("cards").replaceChildren(...first ? [card(`First to ${significant(100 * targetOf(rows))} % accuracy`,
    first.label, `after ${fixed(first.seconds_to_target, 1)} s` +
    (times && first.compression !== "fp32" ? `, ${times.toFixed(1)}x as fast as fp32` : ""))] : [],
    ...[...cards].map(([row, titles]) => card(titles.join("; "), row.label,
      `${percent(row.accuracy)}, ${humanBytes(row.wire_bytes)}, ${fixed(row.step_ms, 1)} ms`)));
}

function drawLegend(groups) {
  find("legend").replaceChildren(...[...groups].map(([name, [row]]) => {
    const mark = element("i", {"aria-hidden": "true"}, row.symbol[1]);
    mark.style.color = rowColor(row);
    const pressed = () => String(!state.hidden.has(name));
    return element("button", {type: "button", "aria-pressed": pressed(), onclick: (event) => {
      if (!state.hidden.delete(name)) state.hidden.add(name);
      event.currentTarget.setAttribute("aria-pressed", pressed());
      update();
    }}, mark, name);
  }));
}

function update() {
  const rows = visibleRows();
  find("count").textContent = rows.length === report.rows.length
    ? `${rows.length} spec${rows.length === 1 ? "" : "s"}` : `${rows.length} of ${report.rows.length}`;
  drawCards();
  drawResults();
  if (report.runs.length) drawConfig();
  if (!state.plotly) return;
  if (!find("tradeoff").hidden) {
    drawTradeoff("by-bytes", "wire_bytes", "bytes per step and rank", humanBytes);
    drawTradeoff("by-time", "step_ms", "median step time, ms", significant);
  }
  if (!find("curves").hidden) drawCurves();
  if (!find("time").hidden) drawParts();
  if (!find("stragglers").hidden) drawStragglers();
  report.bench.forEach(drawBench);
}

function setTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = find("theme").value || (dark ? "dark" : "light");
}

function showSections() {
  const {rows, runs, bench} = report;
  const shown = {
    tradeoff: rows.some((row) => known(row.accuracy)), table: rows.length > 0,
    curves: runs.some((run) => run.curves.loss.value.length), time: rows.some(partsOf),
    stragglers: runs.some((run) => run.waits), bench: bench.length > 0, config: runs.length > 0
  };
  if (!runs.some((run) => run.curves.accuracy.value.length > 1)) {
    find("curve").value = "loss";
    find("curve-x").value = "step";
  }
  for (const [id, show] of Object.entries(shown)) {
    find(id).hidden = !show;
    const title = find(id).querySelector("h2").textContent;
    if (show) find("sections").append(element("a", {href: "#" + id}, title));
  }
  bench.forEach((one, at) => find("benches").append(
    element("h3", {}, `${one.title} (${one.file})`),
    element("div", {class: "chart tall", id: `bench-chart-${at}`, role: "img", "aria-label": one.title}),
    element("p", {class: "hint", id: `bench-hint-${at}`}),
    element("div", {class: "table", id: `bench-table-${at}`}),
    element("p", {class: "hint", id: `bench-count-${at}`})));
  bench.forEach((one, at) => { find(`bench-chart-${at}`).hidden = !one.x; });
}

function describe(groups) {
  const {rows, runs} = report;
  const all = (values) => [...new Set(values.filter((v) => v))].join(", ");
  const seeds = Math.max(0, ...rows.map((row) => row.seeds.length));
  const facts = [];
  if (rows.length) {
    const links = all(rows.map((row) => row.link && row.link.replace(/(\d)([kMGT]?bit)/g, "$1 $2/s")));
    facts.push(`${all(rows.map((row) => row.ranks))} ranks on ${all(rows.map((row) => row.device))}` +
               (links && ` over emulated links of ${links}`));
    if (runs.length) facts.push(`${all(runs.map((run) => run.steps))} steps`);
    if (seeds > 1) facts.push(`means and standard deviations of ${seeds} seeds`);
  }
  find("about").textContent = facts.join("; ");
  find("notes").replaceChildren(...report.notes.map((note) => element("li", {}, note)));
  const versions = all(runs.map((run) => run.config.version));
  find("footer").textContent = `From ${report.files.join(", ")}` +
    `${versions ? `; gradwire ${versions}` : ""}. This page loads nothing from a network.`;
  find("tradeoff-hint").textContent = "Line: the Pareto front, where no spec is more accurate for as little. " +
    (seeds > 1 ? "Bars: one standard deviation. "
      : "One seed: how much accuracy differs by chance is not known; compare --seeds 3 measures it. ") +
    "Open symbols: stochastic rounding. " +
    "Triangles at the border: less accurate than the axis shows.";
  drawLegend(groups);
}

function listen(groups) {
  find("filter").addEventListener("input", update);
  for (const id of ["curve", "curve-x", "curve-log", "unit", "run", "rows-by"]) {
    find(id).addEventListener("change", update);
  }
  find("smoothing").addEventListener("input", drawCurves);
  const recolor = () => { setTheme(); drawLegend(groups); update(); };
  find("theme").addEventListener("change", recolor);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolor);
  matchMedia("(max-width: 600px)").addEventListener("change", update);
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && event.target.tagName !== "INPUT") {
      event.preventDefault();
      find("filter").select();
    } else if (event.key === "Escape" && event.target === find("filter")) {
      find("filter").value = "";
      update();
    }
  });
}

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(find(id).textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function main() {
  setTheme();
  report = JSON.parse(await unpacked("document"));
  const groups = assignStyles(report.rows);
  showSections();
  describe(groups);
  listen(groups);
  update();
  document.head.append(element("script", {}, await unpacked("plotly")));
  state.plotly = true;
  update();
  document.documentElement.dataset.ready = "1";
}

main().catch((error) => {
  find("about").textContent = typeof DecompressionStream === "undefined"
    ? "This page needs a browser of 2023 or later." : `This page failed: ${error}`;
  console.error(error);
});
