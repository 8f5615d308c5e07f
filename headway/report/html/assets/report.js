"use strict";
// Draws the report's charts with uPlot from the JSON in #data.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const one = data.labels.length === 1;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  const show = (value) => (value == null ? "–" : digits.format(value));
  const seconds = (u, ticks) => ticks.map((value) => `${digits.format(value)} s`);
  let drawn = [];
  const tables = new Map(); // of each chart: its columns' names, and its numbers

  function axes(x, y) {
    const look = { stroke: css("--faint"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false } };
    const font = "12px system-ui, sans-serif";
    return [
      { ...look, font, labelFont: font, size: 34, ...x },
      { ...look, font, size: 52, values: (u, ticks) => ticks.map((v) => (v == null ? "" : show(v))), ...y },
    ];
  }

  function line(label, run, more) {
    const stroke = css(`--run-${run}`);
    const fill = one ? stroke + "22" : undefined;
    return { label, stroke, fill, width: 1.5, points: { show: false }, value: (u, v) => show(v), ...more };
  }

  // The numbers of a chart, as a file.
  function download(node, title) {
    const { names, columns } = tables.get(node);
    // A spreadsheet would run a text that begins as a formula.
    const text = (value) => (typeof value === "string" && /^'*\s*[=+@\-\t\r\n\uff1d\uff0b\uff20\uff0d]/.test(value) ? `'${value}` : value);
    const quoted = (value) => (/[",\r\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
    const cell = (value) => (value == null ? "" : quoted(text(value)));
    const rows = columns[0].map((_, k) => columns.map((values) => cell(values[k])).join(","));
    const link = document.createElement("a");
    const address = URL.createObjectURL(new Blob([[names.map(cell).join(","), ...rows, ""].join("\n")], { type: "text/csv" }));
    link.setAttribute("href", address);
    link.download = `${title.toLowerCase().replace(/\W+/g, "-").replace(/^-|-$/g, "")}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }

  // Lines that lie upon one another share their way: the upper ones are dashed.
  function dashes(columns, ways) {
    const group = columns.map(() => []);
    columns.forEach((values, k) => {
      if (ways[k] === sum) return;
      const peak = most(values.map((v) => v ?? 0)) || 1;
      const alike = (other) => ways[other] !== sum && mean(values.map((v, at) => Math.abs((v ?? 0) - (columns[other][at] ?? 0)))) < 0.01 * peak;
      const first = columns.findIndex((_, other) => other < k && alike(other));
      group[first < 0 ? k : first].push(k);
    });
    const found = [];
    for (const members of group) {
      members.forEach((k, place) => { if (place) found[k] = [7 * (members.length - place), 7 * place]; });
    }
    return found;
  }

  // A run far above another would squeeze it: then the axis is logarithmic, but for what is small.
  function squeezed(columns) {
    const peaks = columns.map((values) => most(values.map((v) => v ?? 0))).filter((peak) => peak > 0);
    return peaks.length > 1 && most(peaks) > 20 * Math.min(...peaks) ? Math.min(...peaks) / 4 : 0;
  }

  function add(node, options, values) {
    const width = node.clientWidth;
    const plot = new uPlot({ width, height: 230, ...options }, values, node);
    drawn.push([plot, node]);
    return plot;
  }

  function overTime(node) {
    const key = node.dataset.key;
    const name = (run) => (one ? node.closest("figure").querySelector("b").textContent : data.labels[run]);
    const columns = data.overtime.map((run) => run[key]);
    const low = squeezed(columns);
    const dash = dashes(columns, []);
    tables.set(node, { names: ["time_s", ...data.labels], columns: [data.time, ...columns] });
    if (low) note(node, "logarithmic axis");
    const more = key === "ttft" ? { spanGaps: true } : {}; // nobody may be sent for a while
    const series = columns.map((_, run) => line(name(run), run, { ...more, dash: dash[run] }));
    const ways = columns.map(() => (key === "longest" || key === "ttft" ? most : mean));
    if (key === "itl") {
      data.overtime.forEach((found, run) => {
        if (!found.preempted.some((count) => count != null)) return;
        const k = columns.push(found.preempted) - 1;
        series.push(marks(one ? "Preemptions" : `Preemptions, ${data.labels[run]}`, run, (at) => shown[k][at]));
        ways.push(sum);
      });
    }
    const options = {
      scales: { x: { time: false, range: (u, low, high) => [low, high] }, y: { ...(low ? { distr: 4, asinh: low } : {}), range: (u, min, max) => [0, max * 1.05 || 1] }, n: { range: [0, 1] } },
      axes: axes({ values: seconds }, low ? { splits: (u, axis, min, max) => rounded(max), filter: (u, all) => all } : {}),
      cursor: { sync: { key: "time" }, drag: { x: true, y: false } },
      series: [{ label: "Time", value: (u, v) => (v == null ? "–" : `${show(v)} s`) }, ...series],
    };
    let shown = [];
    const thinned = (factor) => {
      shown = columns.map((values, k) => thin(values, factor, ways[k]));
      const lines = shown.map((values, k) => (ways[k] === sum ? values.map((v) => v && HIGH) : values));
      return [thin(data.time, factor, mean), ...lines];
    };
    const bounded = { itl: "tpot", longest: "tpot", ttft: "ttft", tokens: "tokens" }[key];
    let factor = fit(node, data.time[0], data.time.at(-1));
    options.hooks = {
      draw: [(plot) => bounded && drawBounds(plot, bounded, "y")],
      setScale: [(plot, scale) => {
        const { min, max } = plot.scales.x;
        const wanted = fit(node, min, max);
        if (scale !== "x" || wanted === factor) return;
        factor = wanted;
        queueMicrotask(() => plot.batch(() => {
          plot.setData(thinned(factor), false);
          plot.setScale("x", { min, max });
        }));
      }],
    };
    const plot = add(node, options, thinned(factor));
    if (data.cut) plot.setScale("x", { min: 0, max: data.until });
  }

  // Ticks of an axis that is linear near 0 and logarithmic above: 0, 10, 100 ... below the highest.
  function rounded(max) {
    const top = Math.floor(Math.log10(max));
    return [0, ...[3, 2, 1, 0].map((k) => 10 ** (top - k))];
  }

  function note(node, text) {
    const place = node.closest("figure").querySelector("figcaption span:last-of-type");
    if (!place.textContent.includes(text)) place.textContent += ` (${text})`;
  }

  // How many points to draw as one, so that two pixels or more lie between those in view.
  function fit(node, min, max) {
    const step = (data.time.at(-1) - data.time[0]) / (data.time.length - 1);
    return Math.max(1, Math.round((2 * (max - min)) / step / node.clientWidth));
  }

  const sum = (known) => known.reduce((a, b) => a + b, 0);
  const mean = (known) => sum(known) / known.length;
  const most = (known) => Math.max(...known);

  function thin(values, factor, way) {
    if (factor === 1) return values;
    const found = [];
    for (let at = 0; at < values.length; at += factor) {
      const known = values.slice(at, at + factor).filter((value) => value != null);
      found.push(known.length ? way(known) : null);
    }
    return found;
  }

  const HIGH = 0.95;

  // Preemptions are dots in a row near the top, whatever their number.
  function marks(label, run, count) {
    const color = one ? css("--bad") : css(`--run-${run}`);
    const points = { show: true, size: 6, width: 1, stroke: color, fill: color };
    const value = (u, v, k, at) => show(at == null ? null : count(at) ?? 0);
    return { scale: "n", paths: () => null, points, stroke: color, label, value };
  }

  // A chart of a cluster; the states of its replicas are stacked, the first line on top.
  function fleet(node, found) {
    const lines = found.charts[node.dataset.key];
    const stacked = node.dataset.key === "replicas";
    tables.set(node, { names: ["time_s", ...lines.map(([label]) => label)], columns: [found.time, ...lines.map((given) => given[2])] });
    const banded = lines[0]?.[0] === "most" && lines.length === 3;
    const values = lines.map((given) => given[2]);
    const shown = stacked ? values.map((_, k) => values[0].map((_, at) => sum(values.slice(k).map((v) => v[at])))) : values;
    const series = lines.map(([label, hue], k) => {
      const stroke = hue ? css(hue) : undefined;
      const look = stacked ? { fill: stroke, width: 0, paths: uPlot.paths.stepped({ align: 0 }) } : { fill: undefined, width: hue ? 1.5 : 0 };
      return { label, stroke, points: { show: false }, ...look, value: (u, v, s, at) => show(at == null ? null : values[k][at]) };
    });
    const low = node.dataset.key === "imbalance" ? 1 : 0;
    add(node, {
      scales: { x: { time: false, range: (u, min, max) => [min, max] }, y: { range: (u, min, max) => [low, Math.max(max, low) * (stacked ? 1.15 : 1.05) || 1] } },
      axes: axes({ values: seconds }),
      bands: banded ? [{ series: [1, 3], fill: css(lines[1][1]) + "44" }] : [],
      cursor: { sync: { key: "time" }, drag: { x: true, y: false } },
      series: [{ label: "Time", value: (u, v) => (v == null ? "–" : `${show(v)} s`) }, ...series],
      hooks: {
        drawClear: [(plot) => stacked || shade(plot, found.outages)],
        draw: [(plot) => stacked && drawEvents(plot, found)],
      },
    }, [found.time, ...shown]);
  }

  function shade(plot, outages) {
    const { ctx } = plot;
    const { top, height } = plot.bbox;
    ctx.save();
    clip(plot);
    ctx.fillStyle = css("--bad") + "22";
    for (const [begin, end] of outages) {
      const x = plot.valToPos(begin, "x", true);
      ctx.fillRect(x, top, plot.valToPos(end, "x", true) - x, height);
    }
    ctx.restore();
  }

  function drawEvents(plot, { scalings, outages }) {
    const { ctx } = plot;
    const marks = [...scalings.map(([at, change]) => [at, change > 0 ? "▲" : "▼", "--ink"]), ...outages.map(([at]) => [at, "✕", "--bad"])];
    ctx.save();
    clip(plot);
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    for (const [at, mark, hue] of marks) {
      ctx.fillStyle = css(hue);
      ctx.fillText(mark, plot.valToPos(at, "x", true), plot.bbox.top + 12 * devicePixelRatio);
    }
    ctx.restore();
  }

  function clip({ ctx, bbox }) {
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
  }

  function cdf(node) {
    const found = data.latency[node.dataset.key];
    tables.set(node, { names: ["ms", ...data.labels], columns: [found.ms, ...found.percent] });
    const dash = dashes(found.percent, []);
    const log = found.ms.at(-1) > 4 * found.ms[0];
    const ticks = log ? { filter: (u, all) => all, splits: decades, values: (u, all) => all.map(show) } : {};
    const options = {
      scales: { x: { time: false, distr: log ? 3 : 1, range: (u, low, high) => [low, high] }, y: { range: [0, 100] } },
      axes: axes(ticks, { values: (u, all) => all.map((v) => `${v}%`) }),
      cursor: { drag: { x: true, y: false } },
      series: [{ label: "Up to", value: (u, v) => (v == null ? "–" : `${show(v)} ms`) },
        ...data.labels.map((label, run) => line(one ? "Requests" : label, run, { dash: dash[run], value: (u, v) => (v == null ? "–" : `${v.toFixed(1)}%`) }))],
    };
    options.hooks = { draw: [(plot) => drawBounds(plot, node.dataset.key, "x")] };
    if (found.ms.length) add(node, options, [found.ms, ...found.percent]);
    else node.textContent = "No request has one.";
  }

  // The service levels' bounds on each request, as dashed lines; each bound once.
  function drawBounds(plot, name, scale) {
    const { ctx } = plot;
    const { left, top, width, height } = plot.bbox;
    const { min, max } = plot.scales[scale];
    const bounds = new Set(data.bounds.map((known) => known[name]).filter((value) => value > min && value < max));
    ctx.save();
    ctx.strokeStyle = css("--bad");
    ctx.fillStyle = css("--bad");
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.setLineDash([6, 4]);
    for (const bound of bounds) {
      const at = plot.valToPos(bound, scale, true);
      ctx.beginPath();
      ctx.moveTo(scale === "x" ? at : left, scale === "x" ? top : at);
      ctx.lineTo(scale === "x" ? at : left + width, scale === "x" ? top + height : at);
      ctx.stroke();
      const words = scale === "x" ? `SLO ${show(bound)} ms` : name === "tokens" ? `SLO ${show(bound)} tokens/s` : `SLO ${name.toUpperCase()} ${show(bound)} ms`;
      // Below a distribution, which is high where the bound is.
      const [x, y] = scale === "x" ? [at - 4, top + height - 8 * devicePixelRatio] : [left + width - 4, Math.max(at - 5, top + 14 * devicePixelRatio)];
      ctx.textAlign = "right";
      if (scale !== "x") {
        ctx.fillStyle = css("--paper");
        ctx.fillRect(x + 2, y + 3, -ctx.measureText(words).width - 4, -14 * devicePixelRatio);
      }
      ctx.fillStyle = css("--bad");
      ctx.fillText(words, x, y);
    }
    ctx.restore();
  }

  // Ticks of a log scale: 1, 2, 5, 10 ... or, where many decades are in view, 1, 10, 100 ...
  function decades(u, axis, min, max) {
    const found = [];
    for (let power = 10 ** Math.floor(Math.log10(min)); power <= max; power *= 10) {
      found.push(...(max / min > 200 ? [power] : [power, 2 * power, 5 * power]));
    }
    const inside = found.filter((tick) => min <= tick && tick <= max);
    return inside.length > 1 ? inside : [0.1, 0.5, 0.9].map((part) => Number((min + part * (max - min)).toPrecision(3)));
  }

  // How many seats are in which phase, stacked: of many seats, rows would be too thin.
  function density(node) {
    const { time, seats: top, runs } = data.density;
    const found = runs[Number(node.dataset.key)];
    const layers = [["done, keeps its seat", "--kept", found.done], ["decode", "--decode", found.decode], ["prefill", "--prefill", found.prefill]];
    const used = layers.filter(([, , values]) => values.some((v) => v > 0));
    tables.set(node, { names: ["time_s", ...used.map(([name]) => name)], columns: [time, ...used.map((layer) => layer[2])] });
    const stacked = used.map((_, k) => time.map((_, at) => sum(used.slice(k).map((layer) => layer[2][at]))));
    const series = used.map(([label, hue, values]) => ({
      label, stroke: css(hue), fill: css(hue), width: 0, points: { show: false },
      value: (u, v, s, at) => show(at == null ? null : values[at]),
    }));
    const plot = add(node, {
      scales: { x: { time: false, range: (u, low, high) => [low, high] }, y: { range: [0, top] } },
      axes: axes({ values: seconds }, { label: "seats", labelSize: 16, labelFont: "12px system-ui, sans-serif" }),
      cursor: { sync: { key: "time" }, drag: { x: true, y: false } },
      series: [{ label: "Time", value: (u, v) => (v == null ? "–" : `${show(v)} s`) }, ...series],
    }, [time, ...stacked]);
    if (data.cut) plot.setScale("x", { min: 0, max: data.until });
  }

  // A bar for each request on its seat, in tones of its run's colour: neighbours differ.
  function seats(node) {
    if (data.density) return density(node);
    const bars = data.seats[Number(node.dataset.key)];
    const rows = Math.max(1, ...data.seats.flatMap((run) => run.seat)) + 1;
    const columns = Object.entries(bars);
    tables.set(node, { names: columns.map(([name]) => name), columns: columns.map(([, values]) => values) });
    const bySeat = new Map();
    bars.seat.forEach((seat, k) => bySeat.set(seat, [...(bySeat.get(seat) ?? []), k]));
    const [begin, end] = data.window;
    const tip = document.createElement("div");
    tip.className = "tip";
    const options = {
      height: Math.max(200, Math.min(420, 60 + 8 * rows)),
      legend: { show: false },
      scales: { x: { time: false }, y: { range: [0, rows] } },
      axes: axes({ values: seconds, grid: { show: false } }, { grid: { show: false } }),
      cursor: { sync: { key: "seats" }, drag: { x: true, y: false }, points: { show: false } },
      series: [{}, { paths: () => null, points: { show: false } }],
      hooks: {
        drawClear: [(plot) => drawBars(plot, bars, Number(node.dataset.key))],
        setCursor: [(plot) => point(plot, bars, bySeat, tip)],
      },
    };
    const plot = add(node, options, [[begin, end], [0, rows]]);
    const [min, max] = data.first;
    plot.setScale("x", { min, max });
    plot.over.append(tip);
    plot.over.addEventListener("mouseleave", () => { tip.style.display = "none"; });
  }

  function drawBars(plot, bars, run) {
    const { ctx } = plot;
    const { left, top, width, height } = plot.bbox;
    const colors = tones(css(`--run-${run}`));
    const x = (value) => plot.valToPos(value, "x", true);
    ctx.save();
    clip(plot);
    ctx.fillStyle = css("--panel");
    ctx.fillRect(left, top, width, height);
    bars.seat.forEach((seat, k) => {
      const high = plot.valToPos(seat + 1, "y", true);
      const low = plot.valToPos(seat, "y", true);
      const gap = low - high > 5 ? 1 : 0;
      const start = x(bars.start[k]);
      const stop = x(bars.start[k] + bars.length[k]);
      const wide = Math.max(stop - start - (stop - start > 4 ? 1 : 0), 0.5);
      const id = bars.id[k]; // the next request has another tone, at whatever replica it is
      ctx.fillStyle = colors[(id + Math.floor(id / colors.length)) % colors.length];
      ctx.fillRect(start, high, wide, low - high - gap);
      ctx.fillStyle = "rgba(0, 0, 0, 0.45)";
      ctx.fillRect(start, high, Math.min(x(bars.start[k] + bars.prefill[k]) - start, wide), low - high - gap);
    });
    ctx.restore();
  }

  // Lighter and darker tones of a colour (#rrggbb), told apart side by side.
  function tones(hue) {
    const parts = [1, 3, 5].map((at) => parseInt(hue.slice(at, at + 2), 16));
    return [0.75, 1, 1.3, 1.6].map((light) => `rgb(${parts.map((v) => Math.round(light <= 1 ? v * light : v + (255 - v) * (light - 1))).join(",")})`);
  }

  function point(plot, bars, bySeat, tip) {
    const { left, top } = plot.cursor;
    const time = plot.posToVal(left, "x");
    const seat = Math.floor(plot.posToVal(top, "y"));
    const found = left < 0 || !plot.cursor.event ? undefined
      : (bySeat.get(seat) ?? []).find((k) => bars.start[k] <= time && time <= bars.start[k] + bars.length[k]);
    tip.style.display = found === undefined ? "none" : "block";
    if (found === undefined) return;
    const out = bars.preemptions[found] ? `\npreempted ${bars.preemptions[found]}×` : "";
    tip.textContent = `request ${bars.id[found]}, seat ${seat}\n${show(bars.prompt_tokens[found])} + ${show(bars.output_tokens[found])} tokens\nprefill ${show(bars.prefill[found])} s, in all ${show(bars.length[found])} s${out}`;
    const right = left > plot.over.clientWidth / 2;
    tip.style.left = right ? "" : `${left + 12}px`;
    tip.style.right = right ? `${plot.over.clientWidth - left + 12}px` : "";
    tip.style.top = `${Math.min(top, plot.over.clientHeight - 70)}px`;
  }

  function drawAll() {
    drawn.forEach(([plot]) => plot.destroy());
    drawn = [];
    const kinds = { time: overTime, cdf, seats };
    data.fleets.forEach((found, run) => { kinds[`fleet-${run}`] = (node) => fleet(node, found); });
    document.querySelectorAll(".chart").forEach((node) => kinds[node.dataset.kind](node));
    document.body.dataset.charts = drawn.length;
    document.body.classList.toggle("many-seats", Boolean(data.density));
  }

  window.addEventListener("error", (event) => { document.body.dataset.error = event.message; });
  window.addEventListener("resize", () => drawn.forEach(([plot, node]) => plot.setSize({ width: node.clientWidth, height: plot.height })));
  window.addEventListener("themechange", drawAll);
  document.addEventListener("click", ({ target }) => {
    if (!target.matches("button.csv")) return;
    const figure = target.closest("figure");
    const section = figure.closest("section").querySelector("h2").textContent;
    download(figure.querySelector(".chart"), `${section} ${figure.querySelector("b").textContent}`);
  });
  drawAll();
})();
