"use strict";
// Draws the page from the payload of comparison/page.py. Controls change `state`, and `refresh` redraws everything from
// it.
(() => {
  const SCALES = [{ key: "linear", button: "Linear" }, { key: "log", button: "Log" }];
  const INK = "#1f2328";
  const RULE = "#e6e9ed";
  const DASHES = { solid: "", dash: "6 3", dot: "2 2.5", dashdot: "7 2 2 2" };
  const SYMBOLS = { circle: "M15 2.5a3.5 3.5 0 1 0 .01 0z", square: "M12 3h6v6h-6z",
                    diamond: "M15 1.5l4.5 4.5-4.5 4.5-4.5-4.5z", "triangle-up": "M15 2l4.5 7.5h-9z" };

  const byId = (id) => document.getElementById(id);
  const payload = JSON.parse(byId("payload").textContent, decode);
  const { axes: AXES, runs, setups } = payload;
  const METRICS = [
    { key: "loss", button: "Loss", name: "loss" },
    { key: "bits", button: payload.bits[0].toUpperCase() + payload.bits.slice(1), name: payload.bits },
    { key: "accuracy", button: "Accuracy", name: "accuracy", valOnly: true },
    { key: "error_rate", button: "Error rate", name: "error rate", valOnly: true },
  ];
  const state = { axis: "train_seconds", metric: "loss", x: "linear", y: "linear", smoothing: 2, context: null,
                  size: null, hidden: new Set(), zoom: null };

  // --- The payload -------------------------------------------------------------------------------------------------

  /** A reviver for JSON.parse: columns are little-endian numbers in base64; NaN is a gap. */
  function decode(_key, value) {
    if (!value || typeof value.base64 !== "string") return value;
    const bytes = Uint8Array.from(atob(value.base64), (letter) => letter.charCodeAt(0));
    return new { i4: Int32Array, f4: Float32Array, f8: Float64Array }[value.type](bytes.buffer);
  }

  const hasCurve = (run) => Boolean(run.means || run.val);
  const selected = (run) => ["context", "size"].every((name) => state[name] === null || run[name] === state[name]);
  const shown = (run) => selected(run) && !state.hidden.has(run);
  const runsOf = (setup) => setup.runs.map((index) => runs[index]);

  /** A column of a run's "points" or "means" (train), "val" or "annealed" in the plotted units; null if the run has
      none. */
  function column(run, curve, key) {
    const columns = run[curve] ?? {};
    if (key === "flops") return scaled(columns.tokens, run.flops_per_token);
    if (key === "bits") return scaled(columns.loss, run.bits_per_nat);
    return columns[key] ?? null;
  }

  function scaled(values, factor) {
    return values && factor ? Float64Array.from(values, (value) => value * factor) : null;
  }

  // --- Curves ------------------------------------------------------------------------------------------------------

  /** Weighted mean over `reach` neighbours on each side; over fewer at the start, where loss is steep and a wide
      mean would lag, and at the end. Gaps stay gaps and are ignored in other means. */
  function smooth(values, weights, reach) {
    return Float64Array.from(values, (value, i) => {
      if (!Number.isFinite(value)) return NaN;
      const before = Math.min(Math.floor(i / 5), reach);
      let [sum, weight] = [0, 0];
      for (let j = i - before; j <= Math.min(i + before, values.length - 1); j++) {
        if (!Number.isFinite(values[j])) continue;
        sum += values[j] * weights[j];
        weight += weights[j];
      }
      return sum / weight;
    });
  }

  /** The value of a curve (xs ascending) at x, interpolated linearly; NaN outside it. */
  function interpolate(x, xs, values) {
    let low = 0;
    let high = xs.length - 1;
    if (!(x >= xs[low] && x <= xs[high])) return NaN;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    if (xs[low] === x || high === low) return values[low];
    if (xs[high] === x) return values[high];
    return values[low] + (values[high] - values[low]) * (x - xs[low]) / (xs[high] - xs[low]);
  }

  /** The plotted part of a run's curve: x, y and the columns of the hover text; null if the run lacks an axis. */
  function curveOf(run, curve, key, smoothing = 0) {
    const x = column(run, curve, state.axis);
    const y = column(run, curve, key);
    if (!x || !y) return null;
    const rate = curve === "val" ? rateAt(run, run.val.step) : column(run, curve, "learning_rate");
    const smoothed = smoothing ? smooth(y, run[curve].lines, Math.round(y.length * smoothing / 200)) : y;
    return { x, y: smoothed, rate, step: run[curve].step, seconds: run[curve].train_seconds };
  }

  /** Val lines have no learning rate: it is that of the nearest train lines. */
  function rateAt(run, steps) {
    const { step, learning_rate: rates } = run.points ?? {};
    return step && rates ? Float64Array.from(steps, (at) => interpolate(at, step, rates)) : null;
  }

  /** Mean and standard deviation over curves, at the points of the first within all. */
  function average(curves) {
    const places = Array.from(curves[0].x.keys()).filter((i) => curves.every(
      ({ x }) => curves[0].x[i] >= x[0] && curves[0].x[i] <= x[x.length - 1]));
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    const each = (key) => places.map((i) => curves.map((curve) => interpolate(curves[0].x[i], curve.x, curve[key])));
    const means = (key) => curves.every((curve) => curve[key]) ? each(key).map(mean) : null;
    const y = means("y");
    const spread = each("y").map((values, i) => Math.sqrt(
      values.reduce((sum, value) => sum + (value - y[i]) ** 2, 0) / (values.length - 1)));
    return { x: places.map((i) => curves[0].x[i]), y, spread, rate: means("rate"), step: means("step"),
             seconds: means("seconds") };
  }

  // --- Traces ------------------------------------------------------------------------------------------------------

  const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const faded = (colour, alpha) => colour + Math.round(alpha * 255).toString(16).padStart(2, "0");

  /** A Plotly trace. `meta` identifies it for tests. */
  function trace(kind, setup, members, { x, y }, look) {
    const meta = { kind, runs: members.map((run) => run.name) };
    return { type: "scatter", name: setup.label, meta, x, y, hoverinfo: "skip", showlegend: false, ...look };
  }

  function hover(curve, name, quantity) {
    const customdata = Array.from(curve.x, (_x, i) => [curve.step[i], curve.seconds[i], curve.rate?.[i]]);
    const rate = curve.rate ? "<br>learning rate %{customdata[2]:.3~g}" : "";
    return { hoverinfo: "all", customdata, hovertemplate: `<b>${escaped(name)}</b><br>${quantity}<br>` +
             `step %{customdata[0]:,.0f}<br>%{customdata[1]:,.1f} s of training${rate}<extra></extra>` };
  }

  function faint(setup, run, key) {
    const raw = curveOf(run, "points", key);
    return raw ? [trace("raw", setup, [run], raw, { mode: "lines", opacity: 0.2,
                                                    line: { color: setup.colour, width: 1 } })] : [];
  }

  /** The runs of a set-up as one line of their train ("means") or val curves, with a band if there are several. A
      faint line is behind another and has no band. Runs that ended before other seeds have faint lines of their own. */
  function line(kind, setup, members, key, options) {
    const lasting = members.filter((run) => setup.averaged.includes(runs.indexOf(run)));
    const alone = lasting.length ? members.filter((run) => !lasting.includes(run)) : [];
    return [...alone.flatMap((run) => lineOf(kind, setup, [run], key, { ...options, isFaint: true })),
            ...lineOf(kind, setup, lasting.length ? lasting : members, key, options)];
  }

  function lineOf(kind, setup, members, key, { smoothing = 0, quantity, isFaint = false }) {
    const curves = members.map((run) => curveOf(run, kind === "val" ? "val" : "means", key, smoothing));
    const [known, of] = [curves.filter(Boolean), members.filter((_run, i) => curves[i])];
    if (!known.length) return [];
    const curve = known.length > 1 ? average(known) : known[0];
    const look = kind === "val"
      ? { mode: "lines+markers", marker: { color: setup.colour, symbol: setup.symbol, size: 7,
                                           line: { color: "white", width: 1 } } }
      : { mode: "lines", opacity: isFaint ? 0.35 : 1 };
    return [...(known.length > 1 && !isFaint ? [band(setup, of, curve)] : []),
            trace(kind, setup, of, curve, {
              ...look, line: { color: setup.colour, dash: setup.dash, width: isFaint ? 1.2 : 2 },
              ...hover(curve, title(setup, of), quantity) })];
  }

  /** The final losses of a run at several lengths, joined by a line. */
  function annealed(setup, run, key) {
    const curve = curveOf(run, "annealed", key);
    return curve ? [trace("annealed", setup, [run], curve, {
      mode: "lines+markers", line: { color: setup.colour, width: 1 }, marker: { color: setup.colour, size: 6 },
      ...hover(curve, `${title(setup, [run])}, annealed`, "val " + quantityText()) })] : [];
  }

  function band(setup, members, { x, y, spread }) {
    const at = Array.from(x.keys()).filter((i) => Number.isFinite(spread[i]));
    const back = at.toReversed();
    const edge = { x: [...at, ...back].map((i) => x[i]),
                   y: [...at.map((i) => y[i] + spread[i]), ...back.map((i) => Math.max(0, y[i] - spread[i]))] };
    return trace("band", setup, members, edge, { mode: "lines", line: { width: 0 }, fill: "toself",
                                                 fillcolor: faded(setup.colour, 0.16) });
  }

  const shownMetric = () => METRICS.find(({ key }) => key === state.metric);
  const metricName = () => shownMetric().name;
  const quantityText = () => `${metricName()} %{y:.4f}`;

  /** The set-up's label, with the run's name unless the label already has it. */
  function title(setup, members) {
    const all = setup.runs.length === setup.averaged.length ? "" : `of ${setup.runs.length} `;
    if (members.length > 1) return `${setup.label}, mean of ${members.length} ${all}seeds`;
    const { name } = members[0];
    const isTold = setup.label.split(/ \(|, /).includes(name) || setup.label.endsWith(`, ${name}`);
    return isTold ? setup.label : `${setup.label} · ${name}`;
  }

  // --- Figures -----------------------------------------------------------------------------------------------------

  const narrow = () => window.innerWidth <= 760;

  function plot(id, traces, xaxis, yaxis) {
    const axis = { gridcolor: RULE, linecolor: "#8c959f", showline: true, zeroline: false, ticks: "outside", ticklen: 4,
                   tickcolor: "#8c959f", automargin: true };
    const layout = {
      xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, showlegend: false, hovermode: "closest",
      margin: { l: 52, r: 8, t: 10, b: 44 }, plot_bgcolor: "white", paper_bgcolor: "white",
      font: { family: "system-ui, sans-serif", size: narrow() ? 12 : 13, color: INK },
      hoverlabel: { align: "left", font: { size: 13 } },
      // Touch scrolls the page.
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      // Keep the zoom until another quantity is plotted.
      uirevision: quantities(xaxis, yaxis),
    };
    Plotly.react(id, traces, layout, { responsive: true, displaylogo: false, displayModeBar: narrow() ? false : "hover",
                                       modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] });
  }

  const quantities = (xaxis, yaxis) => [xaxis.title.text, xaxis.type, yaxis.title.text, yaxis.type].join();
  const xAxis = () => ({ type: state.x, title: { text: AXES.find(({ key }) => key === state.axis).title } });
  const shownSetups = () => setups.map((setup) => [setup, runsOf(setup).filter(shown)]).filter(([, of]) => of.length);

  function drawLoss() {
    if (!runs.some(hasCurve)) return;
    const drawn = shownSetups();
    const has = (members, curve) => members.some((run) => column(run, curve, state.metric));
    const split = drawn.every(([, of]) => has(of, "val") || !has(of, "means")) ? "val "
      : drawn.some(([, of]) => has(of, "val")) ? "" : "train ";
    const text = split + metricName() + (state.metric === "loss" ? ` (nats per ${payload.scored})` : "");
    const traces = [
      ...drawn.flatMap(([setup, members]) => members.flatMap((run) => faint(setup, run, state.metric))),
      ...drawn.flatMap(([setup, members]) => line("train", setup, members, state.metric, {
        smoothing: state.smoothing, quantity: "train " + quantityText(), isFaint: has(members, "val") })),
      ...drawn.flatMap(([setup, members]) => line("val", setup, members, state.metric, {
        quantity: "val " + quantityText() })),
      ...drawn.flatMap(([setup, members]) => members.flatMap((run) => annealed(setup, run, state.metric))),
    ];
    const range = state.y === "linear" && !shownMetric().valOnly ? lossRange(traces) : null;
    const [xaxis, yaxis] = [xAxis(), { type: state.y, title: { text }, ...(range ? { range } : { autorange: true }) }];
    const zoom = state.zoom?.of === quantities(xaxis, yaxis) ? state.zoom : null;
    plot("loss", traces, { ...xaxis, ...zoom?.x }, { ...yaxis, ...zoom?.y });
    byId("reading").textContent = reading();
  }

  /** Keep the user's zoom for the next load. */
  function keepZoom() {
    byId("loss").on("plotly_relayout", (change) => {
      if (!Object.keys(change).some((key) => /^[xy]axis/.test(key))) return;
      const { xaxis, yaxis } = byId("loss").layout;
      const [x, y] = [xaxis, yaxis].map(({ range, autorange }) => ({ range: [...range], autorange: Boolean(autorange) }));
      state.zoom = { of: quantities(xaxis, yaxis), x, y };
    });
  }

  /** Initial range of losses: from the lowest to the loss after 3 % of a run, so that the steep start and diverging
      runs do not compress the other curves. */
  function lossRange(traces) {
    const curves = traces.filter(({ meta }) => ["train", "val", "annealed"].includes(meta.kind))
      .map(({ y, meta }) => ({ y: Array.from(y).filter(Number.isFinite), first: meta.kind === "train" ? 1 : 0 }))
      .filter(({ y }) => y.length);
    if (!curves.length) return null;
    const low = Math.min(...curves.map(({ y }) => Math.min(...y)));
    const early = ({ y, first }) => y[Math.min(Math.floor(y.length / 33) + first, y.length - 1)];
    const high = Math.max(...curves.map(early));
    const margin = 0.05 * (high - low) || 0.05;
    return [low - margin, high + margin];
  }

  function reading() {
    const known = (run, key) => ["means", "val"].some((curve) => column(run, curve, key));
    const lacking = (key) => runs.filter((run) => shown(run) && hasCurve(run) && !known(run, key)).map((run) => run.name).join(", ");
    const [axis, metric] = [lacking(state.axis), lacking(state.metric)];
    const { title: text } = AXES.find(({ key }) => key === state.axis);
    return [shownMetric().valOnly ? `Lines with markers: val ${metricName()}.`
              : "Lines with markers: val loss. Faint lines: train loss, smoothed and of single steps.",
            runs.some((run) => shown(run) && run.annealed) &&
              "Points on thin lines: the val loss of runs that end there, as annealed.",
            shownSetups().some(([, of]) => of.length > 1) && "Bands: ± one standard deviation over the seeds.",
            state.y === "linear" && !shownMetric().valOnly &&
              "The first steps are above the figure: double-click it, or choose the logarithmic scale, to show all.",
            state.metric === "bits" && payload.bits.includes("byte") &&
              "Train loss is converted with the bytes per token of the val split.",
            "Click a legend entry to hide a run everywhere, double-click to show only that run.",
            axis && `Without ${text}: ${axis}.`,
            metric && `Without ${metricName()}: ${metric}.`].filter(Boolean).join(" ");
  }

  /** A column of the train lines, over the x axis of the main figure. */
  function drawColumn(key, text, { smoothing, raw }) {
    const drawn = shownSetups();
    const traces = [
      ...(raw ? drawn.flatMap(([setup, members]) => members.flatMap((run) => faint(setup, run, key))) : []),
      ...drawn.flatMap(([setup, members]) => line("train", setup, members, key, {
        smoothing, quantity: `${text} %{y:.3~g}` })),
    ];
    plot(key, traces, xAxis(), { type: "linear", title: { text }, rangemode: "tozero" });
  }

  function drawPositions() {
    const several = new Set(runs.flatMap((run) => run.evaluations.map(({ corpus }) => corpus))).size > 1;
    const traces = shownSetups().flatMap(([setup, members]) => members.flatMap(
      (run) => run.evaluations.map((evaluation) => positionTrace(setup, run, evaluation, several))));
    plot("positions", traces, { type: "log", title: { text: "tokens of context seen" } },
         { type: "linear", title: { text: "loss (nats per token)" } });
  }

  function positionTrace(setup, run, { context, corpus, first, last, loss }, several) {
    const name = `${title(setup, [run])}, context ${context.toLocaleString("en")}${several ? `, ${corpus}` : ""}`;
    const text = first.map((from, i) => `${from.toLocaleString("en")} to ${last[i].toLocaleString("en")} tokens`);
    // On a logarithmic axis a bin is plotted at its middle.
    const x = first.map((from, i) => Math.sqrt(from * last[i]));
    return trace("positions", setup, [run], { x, y: loss }, {
      mode: "lines+markers", line: { color: setup.colour, dash: setup.dash, width: 2 },
      marker: { color: setup.colour, symbol: setup.symbol, size: 7 }, text, hoverinfo: "all",
      hovertemplate: `<b>${escaped(name)}</b><br>%{text}<br>loss %{y:.4f}<extra></extra>` });
  }

  // --- Controls and tables -----------------------------------------------------------------------------------------

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "onclick" || name === "oninput") made[name] = value;
      else if (value !== false && value !== null) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children);
    return made;
  }

  /** Exclusive buttons; the options are { key, button }. */
  function choice(label, name, options) {
    const buttons = options.map(({ key, button }) => element("button", { type: "button", onclick: () => {
      state[name] = key;
      press();
      refresh();
    } }, button));
    const press = () => buttons.forEach((each, i) => each.setAttribute("aria-pressed", options[i].key === state[name]));
    press();
    return element("div", { class: "choice", role: "group", "aria-label": label, "data-name": name }, ...buttons);
  }

  function control(label, ...parts) {
    const kind = parts.every((part) => part.className === "choice") && parts.length > 1 ? "control pair" : "control";
    return element("div", { class: kind }, element("span", {}, label), ...parts);
  }

  function slider() {
    const text = element("output", {}, `${state.smoothing} %`);
    const range = element("input", { type: "range", min: 0, max: 20, step: 0.5, value: state.smoothing,
                                     "aria-label": "Smoothing, in per cent of the run", oninput: () => {
      state.smoothing = Number(range.value);
      text.value = `${state.smoothing} %`;
      drawLoss();
      if (!hiddenSection("gradient_norm")) drawGradient();
    } });
    return [range, text];
  }

  function buildControls() {
    for (const id of ["controls", "loss", "reading"]) byId(id).hidden = !runs.some(hasCurve);
    const known = (key) => runs.some((run) => ["means", "val"].some((curve) => column(run, curve, key)));
    const axes = AXES.filter(({ key }) => known(key));
    const metrics = METRICS.filter(({ key }) => known(key));
    byId("controls").append(
      control("x axis", choice("x axis", "axis", axes), choice("x scale", "x", SCALES)),
      control("y axis", ...(metrics.length > 1 ? [choice("y axis", "metric", metrics)] : []),
              choice("y scale", "y", SCALES)));
    if (runs.some((run) => run.means)) byId("controls").append(control("smoothing", ...slider()));
    for (const name of ["context", "size"]) {
      const values = [...new Set(runs.map((run) => run[name]))].filter((value) => value !== null);
      if (values.length < 2) continue;
      const options = values.map((value) => ({ key: value, button: value.toLocaleString("en") }));
      byId("selectors").append(control({ context: "context", size: "layers × width" }[name],
                                       choice(name, name, [{ key: null, button: "All" }, ...options])));
      byId("selectors").hidden = false;
    }
  }

  /** The line and the marker of a set-up. */
  function swatch({ colour, dash, symbol }) {
    const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    picture.setAttribute("class", "swatch");
    picture.setAttribute("viewBox", "0 0 30 12");
    picture.setAttribute("aria-hidden", "true");
    for (const [path, look] of [["M0 6h30", { stroke: colour, "stroke-width": 2, "stroke-dasharray": DASHES[dash] }],
                                [SYMBOLS[symbol], { fill: colour }]]) {
      const part = document.createElementNS("http://www.w3.org/2000/svg", "path");
      Object.entries({ d: path, ...look }).forEach(([name, value]) => part.setAttribute(name, value));
      picture.append(part);
    }
    return picture;
  }

  /** A button for each set-up, and for each of its runs if there are several. */
  function buildLegend() {
    byId("legend").append(...setups.map((setup) => {
      const members = runsOf(setup);
      const several = members.length > 1;
      const text = several ? `${setup.label}, ${members.length} seeds` : title(setup, members);
      return element("div", { class: "setup" }, toggle(members, {}, swatch(setup), text),
                     ...(several ? members.map((run) => toggle([run], { class: "seed" }, run.name)) : []));
    }), element("button", { type: "button", class: "all", onclick: () => hide([]) }, "Show all"));
  }

  function toggle(members, attributes, ...children) {
    const onclick = ({ detail }) => {
      if (detail > 1) hide(runs.filter((run) => !members.includes(run)));
      else if (members.some(shown)) hide([...state.hidden, ...members]);
      else hide([...state.hidden].filter((run) => !members.includes(run)));
    };
    return Object.assign(element("button", { type: "button", ...attributes, onclick }, ...children), { of: members });
  }

  function drawLegend() {
    for (const button of document.querySelectorAll("#legend button")) {
      if (!button.of) continue;
      button.hidden = !button.of.some(selected);
      button.setAttribute("aria-pressed", button.of.some(shown));
    }
    document.querySelector("#legend .all").hidden = !state.hidden.size;
  }

  function hide(members) {
    state.hidden = new Set(members);
    refresh();
  }

  const hiddenSection = (id) => byId(id).closest("section").hidden;
  const reveal = (id, known) => { byId(id).closest("section").hidden = !known; };

  /** Rows { cells, runs, best, mean }: a row is hidden with the last of its runs; one without runs stays. */
  function table(id, { headings, rows, text = 2 }) {
    const kind = (column) => (column < text ? "text" : "");
    const body = rows.map((row) => {
      const cells = row.cells.map((cell, i) => element("td", {
        class: `${kind(i)}${row.best?.includes(i) ? " best" : ""}` }, cell));
      return Object.assign(element("tr", { class: row.mean ? "mean" : "" }, ...cells),
                           { of: row.runs?.map((index) => runs[index]) });
    });
    byId(id).replaceChildren(element("table", {},
      element("thead", {}, element("tr", {}, ...headings.map(
        (heading, i) => element("th", { class: kind(i) }, heading.replaceAll(" %", "\u00a0%"))))),
      element("tbody", {}, ...body)));
    reveal(id, rows.length);
  }

  function hideRows() {
    for (const row of document.querySelectorAll("tbody tr")) {
      if (row.of) row.hidden = !row.of.some(shown);
    }
  }

  /** The fields in which the shown runs differ: one column per run. */
  function drawConfigs() {
    const columns = Array.from(runs.keys()).filter((i) => shown(runs[i]));
    const rows = payload.configs.map(({ field, values }) => [field, ...columns.map((i) => values[i])])
      .filter(([, ...values]) => new Set(values).size > 1);
    table("configs", { headings: ["", ...columns.map((i) => runs[i].name)], text: Infinity,
                       rows: rows.map((cells) => ({ cells, runs: columns })) });
  }

  /** Static figures, of a study or of abilities: each with its legend, table and remarks. */
  function buildFigures(id, figures) {
    figures.forEach((figure, i) => {
      const [plotId, tableId] = [`${id}-${i}`, `${id}-table-${i}`];
      const style = figure.grid && `height: ${170 + 26 * figure.lines.length}px`;
      byId(id).append(
        element("h3", {}, figure.title),
        ...(figure.values.length ? [element("div", { class: "plot", id: plotId, style })] : []),
        ...(figure.legend ? [element("div", { class: "legend" }, ...figure.lines.map(
          (line) => element("span", {}, swatch(line), line.label)))] : []),
        element("div", { class: "scroll", id: tableId }),
        ...figure.remarks.map((remark) => element("p", { class: "note" }, remark)));
      if (figure.rows.length) table(tableId, { ...figure, rows: figure.rows.map((cells) => ({ cells })), text: 1 });
    });
    reveal(id, figures.length);
    figures.forEach((figure, i) => {
      if (figure.values.length) (figure.grid ? drawGrid : drawStudy)(`${id}-${i}`, figure);
    });
  }

  /** A cell for each line and category, coloured by its value between 0 and 1. */
  function drawGrid(id, figure) {
    const cells = figure.lines.map(({ points }) => figure.values.map((x) => points.find((point) => point.x === x)));
    const trace = {
      type: "heatmap", x: figure.values, y: figure.lines.map(({ label }) => label),
      meta: { kind: "study", runs: figure.lines.flatMap(({ points }) => points.flatMap((point) => point.runs)) },
      z: cells.map((row) => row.map((point) => point ? point.mean : null)), zmin: 0, zmax: 1, colorscale: "Cividis",
      text: cells.map((row) => row.map((point) => point ? point.mean.toFixed(2) : "")), texttemplate: "%{text}",
      xgap: 1, ygap: 1, colorbar: { title: { text: figure.y, side: "right" }, thickness: 12 },
      hovertemplate: "<b>%{y}</b><br>%{x}<br>%{z:.4f}<extra></extra>",
    };
    plot(id, [trace], { type: "category", title: { text: "" }, showgrid: false },
         { type: "category", title: { text: "" }, autorange: "reversed", showgrid: false });
  }

  function drawStudy(id, figure) {
    const traces = figure.lines.flatMap((line) => [studyTrace(figure, line), ...bestTrace(line)]);
    const ticks = figure.ticks && figure.x_axis !== "category"
      ? { tickvals: figure.values, ticktext: figure.values.map((value) => Number(value.toPrecision(6)).toLocaleString(
        "en", { maximumSignificantDigits: 6 })) }
      : {};
    const order = figure.x_axis === "category" ? { categoryorder: "array", categoryarray: figure.values } : {};
    plot(id, traces, { type: figure.x_axis, title: { text: figure.x }, ...ticks, ...order },
         { type: "linear", title: { text: figure.y }, zeroline: figure.zero, zerolinecolor: "#8c959f",
           ...(figure.zero && { rangemode: "tozero" }) });
  }

  /** A line of means with bars for their intervals. */
  function studyTrace(figure, { label, colour, dash, symbol, points: drawn, published, fitted }) {
    const faint = published || fitted;
    // A point without a mean interrupts the line.
    const gap = { x: null, mean: null, interval: null, seeds: 0, runs: [] };
    const points = drawn.flatMap((point) => point.joined === false ? [gap, point] : [point]);
    const bars = (end, sign) => points.map(({ mean, interval }) => interval ? sign * (interval[end] - mean) : 0);
    const customdata = points.map(({ interval, seeds }) => [
      interval ? `95 % interval ${interval.map((end) => end.toFixed(4)).join(" to ")}` : "no interval",
      published ? "published" : fitted ? "fit" : `${seeds} seed${seeds > 1 ? "s" : ""}`]);
    return { type: "scatter", name: label, meta: { kind: "study", runs: points.flatMap((point) => point.runs) },
             x: points.map(({ x }) => x), y: points.map(({ mean }) => mean), showlegend: false, customdata,
             mode: figure.x_axis === "category" ? "markers" : "lines+markers", line: { color: colour, dash, width: 2 },
             marker: { color: colour, symbol: faint ? `${symbol}-open` : symbol, size: 8 }, opacity: faint ? 0.6 : 1,
             error_y: { type: "data", symmetric: false, array: bars(1, 1), arrayminus: bars(0, -1), color: colour,
                        thickness: 1.5, width: 4 },
             hovertemplate: `<b>${escaped(label)}</b><br>${escaped(figure.x)} %{x}<br>%{y:.4f}<br>%{customdata[0]}` +
                            "<br>%{customdata[1]}<extra></extra>" };
  }

  /** A ring around the best point of a line. */
  function bestTrace({ label, colour, points, best }) {
    const at = points.filter(({ x }) => best !== null && x === best);
    return at.map(({ x, mean, runs: of }) => ({
      type: "scatter", name: label, meta: { kind: "best", runs: of }, x: [x], y: [mean], mode: "markers",
      showlegend: false, hoverinfo: "skip", marker: { color: colour, symbol: "circle-open", size: 18, line: { width: 2 } } }));
  }

  function drawBars(id, key, text) {
    const drawn = shownSetups().flatMap(([setup, members]) => members.filter((run) => run[key] !== null)
      .map((run) => [setup, run]));
    const largest = Math.max(...drawn.map(([, run]) => run[key]));
    byId(id).replaceChildren(...drawn.map(([setup, run]) => {
      const bar = element("div", { class: "bar" });
      Object.assign(bar.style, { width: `${100 * run[key] / largest}%`, background: setup.colour });
      return element("li", {}, element("span", { class: "name", title: title(setup, [run]) }, run.name),
                     element("div", { class: "track" }, bar), element("span", { class: "value" }, text(run[key])));
    }));
  }

  function drawSamples() {
    byId("samples").replaceChildren(...runs.filter((run) => shown(run) && run.sample_step !== null).map((run) => {
      const step = element("span", {}, ` · step ${whole(run.sample_step)}`);
      const sample = run.sample_image === null ? element("pre", { tabindex: "0" }, run.sample)
        : element("img", { src: run.sample_image, alt: `Images sampled from ${run.name}` });
      return element("figure", {}, element("figcaption", {}, run.name, step), sample);
    }));
  }

  // --- The page ----------------------------------------------------------------------------------------------------

  const drawGradient = () => drawColumn("gradient_norm", "gradient norm", { smoothing: state.smoothing, raw: true });
  const drawRate = () => drawColumn("learning_rate", "learning rate", { smoothing: 0, raw: false });
  const whole = (value) => Math.round(value).toLocaleString("en");
  const mebibytes = (value) => (value / 2 ** 20).toLocaleString("en", { maximumSignificantDigits: 4 });

  /** Redraws everything that depends on `state`, in each existing section. */
  const PANELS = {
    throughput: [(run) => run.tokens_per_second !== null, () => drawBars("throughput", "tokens_per_second", whole)],
    memory: [(run) => run.memory !== null, () => drawBars("memory", "memory", mebibytes)],
    positions: [(run) => run.evaluations.length, drawPositions],
    gradient_norm: [(run) => column(run, "means", "gradient_norm"), drawGradient],
    learning_rate: [(run) => column(run, "means", "learning_rate"), drawRate],
    samples: [(run) => run.sample_step !== null, drawSamples],
  };

  function refresh() {
    drawLegend();
    drawLoss();
    hideRows();
    drawConfigs();
    for (const [id, [has, draw]] of Object.entries(PANELS)) {
      reveal(id, runs.some((run) => shown(run) && has(run)));
      if (!hiddenSection(id)) draw();
    }
  }

  /** Redraws figures at the width of paper for printing, and of the window afterwards. */
  function resize(width) {
    for (const figure of document.querySelectorAll(".plot.js-plotly-plot")) {
      Plotly.relayout(figure, width ? { width, autosize: false } : { width: null, autosize: true });
    }
  }

  // --- Reloading of a watched page ----------------------------------------------------------------------------------

  /** Reloads after a while without interaction; less often if the page is older. */
  function reload() {
    let timer = null;
    const age = Date.now() - Date.parse(document.lastModified);
    const wait = Math.max(1000 * payload.reload_seconds, Math.min(age / 10 || 0, 60_000));
    const again = () => {
      clearTimeout(timer);
      timer = setTimeout(() => {
        if (document.hidden) return again();
        history.replaceState(view(), "");
        location.reload();
      }, wait);
    };
    for (const event of ["pointermove", "pointerdown", "keydown", "input", "scroll"]) {
      addEventListener(event, again, { capture: true, passive: true });
    }
    again();
  }

  /** The settings, in terms that stay valid in the next version of the page. */
  function view() {
    return { ...state, hidden: Array.from(state.hidden, (run) => run.name) };
  }

  /** Restores the settings from before the reload, where they still apply. */
  function restore() {
    const { hidden = [], ...chosen } = history.state ?? {};
    history.replaceState(null, "");
    Object.assign(state, chosen, { hidden: new Set(runs.filter((run) => hidden.includes(run.name))) });
    for (const name of ["context", "size"]) {
      if (!runs.some((run) => run[name] === state[name])) state[name] = null;
    }
  }

  function build() {
    restore();
    const { zoom } = state;
    state.zoom = null;
    byId("verdict").append(...payload.verdict.map((sentence) => element("p", {}, sentence)));
    byId("warnings").append(...payload.warnings.map((warning) => element("li", {}, "⚠ " + warning)));
    byId("warnings").hidden = !payload.warnings.length;
    buildControls();
    buildLegend();
    table("figures", payload.figures);
    byId("figures-note").textContent = payload.figures.note;
    table("times", payload.times);
    byId("times-note").textContent = payload.times.note;
    byId("note").textContent = payload.note;
    buildFigures("study", payload.study);
    buildFigures("abilities", payload.abilities);
    refresh();
    if (runs.some(hasCurve)) keepZoom();
    if (zoom) {  // after the first drawing, to which a double-click returns
      state.zoom = zoom;
      drawLoss();
    }
    if (payload.reload_seconds) reload();
    addEventListener("beforeprint", () => resize(680));
    addEventListener("afterprint", () => resize(null));
  }

  build();
})();
