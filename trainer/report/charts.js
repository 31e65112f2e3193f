"use strict";
// The charts of the report; page.js has the document, the filter, the tables and the page.

function draw(id, traces, layout, empty) {
  const chart = find(id);
  if (chart.classList.contains("empty")) chart.textContent = "";
  chart.classList.toggle("empty", traces.length === 0);
  if (traces.length === 0) {
    if (state.plotly) Plotly.purge(chart);
    chart.style.height = "";
    chart.textContent = empty;
    return;
  }
  const axis = {gridcolor: color("grid"), linecolor: color("grid"), zeroline: false, automargin: true,
                tickcolor: color("grid"), ticklabelposition: "outside"};
  const whole = {
    font: {family: getComputedStyle(document.body).fontFamily, size: 12.5, color: color("faint")},
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    margin: {l: 52, r: 10, t: 12, b: 46}, dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    modebar: {bgcolor: "rgba(0,0,0,0)", color: color("grid"), activecolor: color("accent")},
    hoverlabel: {bgcolor: color("card"), bordercolor: color("faint"), align: "left", namelength: -1,
                 font: {color: color("ink"), size: 13}},
    height: chart.clientHeight, ...layout, xaxis: {...axis, ...layout.xaxis}, yaxis: {...axis, ...layout.yaxis}
  };
  const modebar = ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"];
  Plotly.react(chart, traces, whole,
               {responsive: true, displaylogo: false, modeBarButtonsToRemove: modebar,
                displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false});
}

// Returns a logarithmic axis with at most about `most` ticks: 1, 2 and 5 times powers of ten, or multiples of
// one step where the range is narrow.
function logAxis(low, high, most, text, title) {
  const ticks = (digits) => {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); ++power) {
      found.push(...digits.map((digit) => +(digit * 10 ** power).toPrecision(3)));
    }
    return found.filter((value) => value >= low && value <= high);
  };
  let values = [[1, 2, 5], [1, 3], [1]].map(ticks).find((found) => found.length <= most) || [];
  if (values.length < 3) {
    const size = 10 ** Math.floor(Math.log10((high - low) / most));
    const step = size * ([1, 2, 5].find((factor) => factor * size * most >= high - low) || 10);
    values = [];
    for (let at = Math.ceil(low / step); at * step <= high; ++at) values.push(+(at * step).toPrecision(6));
  }
  return {type: "log", range: [Math.log10(low), Math.log10(high)], tickvals: values, tickangle: 0,
          ticktext: values.map(text), title: {text: title, standoff: 8}};
}

// Returns the points with the best accuracy for at most their x, in order of x.
function paretoFront(points) {
  const front = [];
  for (const point of [...points].sort((a, b) => a.x - b.x || b.row.accuracy - a.row.accuracy)) {
    if (!front.length || point.row.accuracy > front[front.length - 1].row.accuracy) front.push(point);
  }
  return front;
}

function hoverText(row) {
  const lines = [`<b>${escaped(row.label)}</b>`,
                 withSpread(percent(row.accuracy), row.accuracy_std, 2, 100) + " test accuracy",
                 `${humanBytes(row.wire_bytes)} per step, ${fixed(row.ratio, 2)}x less than FP32`,
                 `${fixed(row.step_ms, 2)} ms per step, loss ${fixed(row.loss, 4)}`];
  if (known(row.bytes_per_element)) lines[2] += `, ${significant(row.bytes_per_element)} B/element`;
  if (row.seeds.length > 1) lines.push(`${row.seeds.length} seeds`);
  return lines.join("<br>");
}

// Returns the labels of the front and their places: above and to the left of the points, or below and to the
// right. A label that would overlap another label, a point of the front or the border is empty. The ends of the
// front come first. `place` maps a point to pixels.
function frontLabels(front, place, width) {
  const boxes = front.map(place).map(([x, y]) => [x - 3, y - 3, x + 3, y + 3]);
  const labels = front.map(() => ""), places = front.map(() => "top left");
  for (const at of new Set([0, front.length - 1, ...front.keys()])) {
    const [x, y] = place(front[at]), long = 6.6 * front[at].row.label.length + 10;
    for (const [side, box] of [["top left", [x - long, y - 22, x, y - 4]],
                               ["bottom right", [x, y + 4, x + long, y + 22]]]) {
      const free = box[0] > 0 && box[2] < width &&
        !boxes.some((b) => box[0] < b[2] && b[0] < box[2] && box[1] < b[3] && b[1] < box[3]);
      if (!free) continue;
      boxes.push(box);
      labels[at] = `\u00a0\u00a0${escaped(front[at].row.label)}\u00a0\u00a0`;
      places[at] = side;
      break;
    }
  }
  return {text: labels, textposition: places};
}

function drawTradeoff(id, key, title, text) {
  const points = visibleRows().filter((row) => known(row.accuracy) && row[key] > 0)
    .map((row) => ({row, x: row[key], y: 100 * row.accuracy, spread: 100 * (row.accuracy_std || 0)}));
  if (!points.length) return draw(id, [], {}, "No spec in this selection has both values.");
  const sorted = points.map((p) => p.y).sort((a, b) => a - b);
  const best = sorted[sorted.length - 1], middle = sorted[sorted.length >> 1];
  const lowest = Math.max(sorted[0], best - Math.max(6 * (best - middle), 5));
  const front = paretoFront(points).filter((p) => p.y >= lowest);
  // Diverged runs are shown at the border, so that they do not squeeze the others.
  for (const p of points) p.cut = p.y < lowest;
  for (const p of points.filter((p) => p.cut)) Object.assign(p, {y: lowest, spread: 0});
  const ends = points.flatMap((p) => [p.y - p.spread, p.y + p.spread]);
  const room = Math.max(0.08 * (Math.max(...ends) - Math.min(...ends)), 0.05);
  const yRange = [Math.min(...ends) - room, Math.max(...ends) + room];
  const [least, most] = [Math.min(...points.map((p) => p.x)), Math.max(...points.map((p) => p.x))];
  const margin = Math.max((most / least) ** 0.1, 1.05);
  const width = find(id).clientWidth - 66, height = find(id).clientHeight - 58;
  const xaxis = logAxis(least / margin, most * margin, width / 64, text, title);
  const place = (p) => [(Math.log10(p.x) - xaxis.range[0]) / (xaxis.range[1] - xaxis.range[0]) * width,
                        (yRange[1] - p.y) / (yRange[1] - yRange[0]) * height];
  const path = {x: front.map((p) => p.x), y: front.map((p) => p.y), hoverinfo: "skip"};
  const traces = [{...path, mode: "lines", opacity: 0.55,
                   line: {shape: "hv", color: color("accent"), width: 2}}];
  for (const group of new Set(points.map((p) => p.row.group))) {
    const some = points.filter((p) => p.row.group === group);
    traces.push({
      x: some.map((p) => p.x), y: some.map((p) => p.y), mode: "markers", name: group,
      hovertext: some.map((p) => hoverText(p.row)), hoverinfo: "text", cliponaxis: false,
      error_y: {type: "data", array: some.map((p) => p.spread), visible: some.some((p) => p.spread > 0),
                thickness: 1.2, width: 3},
      marker: {size: 10, color: rowColor(some[0].row), line: {width: 1.6, color: rowColor(some[0].row)},
               symbol: some.map((p) => (p.cut ? "triangle-down" : p.row.symbol[0]) +
                                       (p.row.label.includes("stochastic") ? "-open" : ""))}
    });
  }
  traces.push({...path, mode: "text", cliponaxis: false, ...frontLabels(front, place, width),
               textfont: {color: color("ink"), size: 12}});
  const yaxis = {range: yRange, ticksuffix: " %", title: {text: "test accuracy", standoff: 6}};
  draw(id, traces, {xaxis, yaxis});
}

// Exponential moving average whose first values are not biased towards 0.
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (known(value)) {
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
    }
    return norm ? sum / norm : null;
  });
}

function drawCurves() {
  const kind = find("curve").value, by = find("curve-x").value, weight = +find("smoothing").value;
  const runs = seedsOf(visibleRows()).filter(({run}) => run.curves[kind].value.length);
  const some = runs.slice(0, MOST_CURVES);
  const scale = kind === "accuracy" ? 100 : 1;
  const traces = [];
  for (const {row, run, name} of some) {
    const curve = run.curves[kind], x = curve[by], values = curve.value.map((v) => known(v) ? v * scale : v);
    const line = {color: rowColor(row), dash: row.dash, width: 2};
    const smooth = kind === "loss" && weight > 0;
    if (smooth && some.length <= 8) {
      traces.push({x, y: values, mode: "lines", hoverinfo: "skip", opacity: 0.22,
                   line: {color: line.color, width: 1}});
    }
    traces.push({
      x, y: smooth ? smoothed(values, weight) : values, name, line,
      mode: kind === "accuracy" || values.length < 3 ? "lines+markers" : "lines",
      marker: {symbol: row.symbol[0], size: 7},
      hovertemplate: `<b>${escaped(name)}</b><br>%{y:.4~g}${kind === "accuracy" ? " % accuracy" : " loss"}` +
                     `<br>at %{x:.4~s}${{step: " steps", seconds: " s", bytes: "B"}[by]}<extra></extra>`
    });
  }
  find("smoothing").disabled = kind !== "loss";
  find("smoothing-value").textContent = weight.toFixed(2);
  find("curve-hint").textContent = (runs.length > some.length ?
    `The first ${some.length} of ${runs.length} runs; filter to see others. ` : "") +
    "Smoothing is an exponential moving average. Curves of over 1000 steps are means of equal ranges.";
  draw("curve-chart", traces, {
    xaxis: {title: {text: {step: "step", seconds: "seconds of training", bytes: "bytes sent by rank 0"}[by],
                    standoff: 8}, tickformat: "~s", ticksuffix: by === "bytes" ? "B" : ""},
    yaxis: {type: find("curve-log").checked ? "log" : "linear", ticksuffix: kind === "accuracy" ? " %" : "",
            title: {text: kind === "accuracy" ? "test accuracy" : "training loss", standoff: 6}}
  }, "No run in this selection has a log with such a curve.");
}

// The parts of a row's step; without logs, only the wait for communication is known.
function partsOf(row) {
  if (row.parts) return row.parts;
  if (!known(row.step_ms) || !known(row.exposed_comm_ms)) return null;
  return {exposed_comm: row.exposed_comm_ms, other: Math.max(0, row.step_ms - row.exposed_comm_ms)};
}

function drawParts() {
  const rows = visibleRows().filter(partsOf);
  const asShare = find("unit").value === "share";
  const names = Object.keys(PART_NAMES).filter((name) => rows.some((row) => partsOf(row)[name] > 0));
  const whole = (row) => names.reduce((sum, name) => sum + (partsOf(row)[name] || 0), 0) || 1;
  const chart = find("part-chart"), narrow = chart.clientWidth < 560;
  const short = (text) => narrow && text.length > 18 ? text.slice(0, 17) + "…" : text;
  find("part-legend").replaceChildren(...names.map((name) => {
    const mark = element("i", {}, "■");
    mark.style.color = color(name);
    return element("span", {}, mark, PART_NAMES[name]);
  }));
  const traces = names.map((name) => ({
    type: "bar", orientation: "h", name: PART_NAMES[name], y: rows.map((_, at) => at), hoverinfo: "text",
    x: rows.map((row) => (partsOf(row)[name] || 0) * (asShare ? 100 / whole(row) : 1)),
    marker: {color: color(name), line: {color: color("page"), width: 1},
             pattern: name === "exposed_comm"
               ? {shape: "/", bgcolor: color(name), fgcolor: color("page"), size: 7, solidity: 0.2} : {}},
    hovertext: rows.map((row) => {
      const parts = partsOf(row), ms = parts[name] || 0;
      const lines = [`<b>${escaped(row.label)}</b>`,
                     `${PART_NAMES[name]}: ${ms.toFixed(2)} ms, ${(100 * ms / whole(row)).toFixed(1)} %`];
      if (known(parts.compress)) {
        lines.push(`in parallel: compress ${parts.compress.toFixed(2)} ms`,
                   `communicate ${parts.communicate.toFixed(2)} ms`,
                   `decompress ${parts.decompress.toFixed(2)} ms`);
      }
      return lines.join("<br>");
    })
  }));
  chart.style.height = 26 * rows.length + 70 + "px";
  draw("part-chart", rows.length ? traces : [], {
    barmode: "stack", bargap: 0.25, margin: {l: 20, r: 12, t: 4, b: 44},
    xaxis: {title: {text: asShare ? "percent of the step" : "milliseconds per step", standoff: 8},
            range: asShare ? [0, 100] : undefined},
    yaxis: {autorange: "reversed", tickvals: rows.map((_, at) => at), showgrid: false,
            ticktext: rows.map((row) => escaped(short(row.label)))}
  }, "No spec in this selection has times.");
}

function drawStragglers() {
  const runs = seedsOf(visibleRows()).filter(({run}) => run.waits);
  const select = find("run"), chosen = select.value;
  select.replaceChildren(...runs.map(({run, name}, at) => element("option", {value: run.log},
    name + (run.waits.straggler ? ` (rank ${run.waits.straggler.rank})` : ""))));
  if (runs.some(({run}) => run.log === chosen)) select.value = chosen;
  const found = runs.find(({run}) => run.log === select.value) || runs[0];
  if (!found) {
    find("straggler").textContent = "";
    draw("wait-matrix", [], {}, "No run in this selection has waits between ranks.");
    return;
  }
  const {waited_s: waited, seconds, straggler} = found.run.waits;
  find("straggler").textContent = straggler
    ? `Rank ${straggler.rank} is the straggler: each other rank waited ` +
      `${significant(straggler.behind_s)} s longer (${(100 * straggler.share).toFixed(0)} % of the time).`
    : "No rank is a straggler: all ranks wait about equally.";
  const ranks = waited.map((_, rank) => rank);
  const z = waited.map((row) => row.map((value) => 100 * value / seconds));
  draw("wait-matrix", [{
    type: "heatmap", z, x: ranks, y: ranks, xgap: 2, ygap: 2, zmin: 0,
    colorscale: [[0, color("card")], [1, color("exposed_comm")]], colorbar: {ticksuffix: " %", thickness: 10},
    hovertemplate: `<b>${escaped(found.name)}</b><br>rank %{y} waited %{z:.1f} % for rank %{x}<extra></extra>`
  }], {
    xaxis: {title: {text: "for rank", standoff: 8}, dtick: Math.ceil(ranks.length / 16), showgrid: false},
    yaxis: {title: {text: "rank", standoff: 6}, dtick: Math.ceil(ranks.length / 16), autorange: "reversed",
            showgrid: false},
    annotations: ranks.length > 8 ? [] : ranks.flatMap((r) => ranks.filter((p) => p !== r).map((p) => (
      {x: p, y: r, text: z[r][p].toFixed(0), showarrow: false, font: {color: color("ink"), size: 12}})))
  });
}
