"use strict";
// The studio's page: knobs, the runs that they stand for, and how these compare.
(() => {
  const start = JSON.parse(document.getElementById("start").textContent);
  const MOST_PINS = 4;
  const MOST_UNUSED = 8; // columns that are named
  const SILENT = "The studio does not answer: is it still running?";
  const byId = (id) => document.getElementById(id);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  const show = (value) => (value == null ? "–" : digits.format(value));
  const FIGURES = [
    ["output_throughput", "Output tokens/s", 1], ["request_throughput", "Requests/s", 1],
    ["slo_attainment", "SLO attainment of all requests, %", 100], ["mean_ttft_ms", "Mean TTFT, ms", 1], ["p99_ttft_ms", "P99 TTFT, ms", 1],
    ["mean_tpot_ms", "Mean TPOT, ms", 1], ["p99_tpot_ms", "P99 TPOT, ms", 1], ["mean_e2el_ms", "Mean E2EL, ms", 1],
    ["p99_e2el_ms", "P99 E2EL, ms", 1], ["gpu_busy_fraction", "GPU busy, %", 100],
    ["kv_cache_usage_mean", "Mean KV cache usage, %", 100], ["preemptions", "Preemptions", 1],
    ["dollars_per_million_output_tokens", "$ per million output tokens", 1],
  ];
  const CHARTS = { // which chart shows what a finding is about; the others stand beside the figures
    memory: "kv", preemption: "kv", forgotten_prefixes: "kv", waiting: "waiting", urgent: "waiting", unfair: "waiting", rejected: "waiting",
    prefill_stalls: "tpot", unused_seats: "running", low_load: "running",
  };
  const HEADLINE = [["output_throughput", "", 1, "tokens/s"], ["p99_ttft_ms", "P99 TTFT ", 1, "ms"], ["slo_attainment", "SLO ", 100, "%"]];
  let knobs = start.knobs;
  let trace = "", file = "", title = start.name; // an uploaded trace: what the server calls it, its own name, and its scenario's
  let unread = "", why = ""; // a chosen file that is not played, and what it lacks
  let waiting = {}; // values of a link for knobs that come with a trace
  let current = null, ghost = null, full = null; // what is shown, what was before, the last whole run
  const pins = []; // {run, hue}: a pin keeps its colour
  let under = null; // the request under way
  let drawn = [];

  // Head the page with whose results these are.
  function head() {
    byId("name").textContent = whose();
    document.title = `${whose()}, studio`;
  }

  // Knobs.

  function build() {
    byId("knobs").replaceChildren(...knobs.map((knob) => {
      const row = document.createElement("div");
      row.className = "knob-row";
      const label = document.createElement("label");
      label.htmlFor = `knob-${knob.name}`;
      label.append(Object.assign(document.createElement("span"), { textContent: knob.label }));
      const control = document.createElement(knob.menu ? "select" : "input");
      control.id = label.htmlFor;
      control.name = knob.name;
      const wrong = Object.assign(document.createElement("p"), { className: "wrong", role: "alert" });
      control.addEventListener("input", () => { wrong.textContent = ""; });
      if (knob.menu) {
        control.append(...knob.values.map((value, k) => new Option(knob.notes[k] ? `${value}: ${knob.notes[k]}` : value, value)));
        control.value = knob.value;
      } else {
        const typed = Object.assign(document.createElement("input"), { type: "text", inputMode: "decimal", className: "typed" });
        typed.setAttribute("aria-label", `${knob.label}, typed`);
        typed.addEventListener("change", () => {
          const text = typed.value.trim();
          const value = knob.values.includes(text) ? text : text && Number(text.replaceAll(",", "")); // a word of its, as "none"
          const taken = text && offerValue(knob, value);
          if (taken) slide(knob, control, value);
          tell(knob, row, control);
          wrong.textContent = taken ? "" : `${text.slice(0, 40) || "nothing"} is not ${range(knob)}: it stays ${typed.value}`;
          if (taken) run();
        });
        label.append(typed);
        row.append(wrong);
        control.type = "range";
        slide(knob, control, knob.value);
        control.addEventListener("input", () => tell(knob, row, control));
      }
      control.addEventListener("change", () => { tell(knob, row, control); run(); });
      row.prepend(label, control);
      tell(knob, row, control);
      return row;
    }));
  }

  // Put a number between a slider's ends among its values; say whether that may be.
  function offerValue(knob, value) {
    if (knob.values.includes(value)) return true;
    const numbers = knob.values.filter((one) => typeof one === "number");
    const whole = numbers.every(Number.isInteger);
    if (knob.menu || typeof value !== "number" || !(value >= Math.min(...numbers) && value <= Math.max(...numbers)) || (whole && !Number.isInteger(value))) return false;
    const words = knob.values.filter((one) => typeof one === "string"), first = knob.values.length && typeof knob.values[0] === "string";
    const sorted = [...numbers, value].sort((a, b) => a - b);
    knob.values = first ? [...words, ...sorted] : [...sorted, ...words];
    return true;
  }

  // Say what may be typed into a slider.
  function range(knob) {
    const numbers = knob.values.filter((one) => typeof one === "number");
    const words = knob.values.filter((one) => typeof one === "string").map((one) => ` or ${one}`).join("");
    return `a ${numbers.every(Number.isInteger) ? "whole " : ""}number from ${digits.format(Math.min(...numbers))} to ${digits.format(Math.max(...numbers))}${words}`;
  }

  const slide = (knob, control, value) => Object.assign(control, { min: 0, max: knob.values.length - 1, step: 1, value: knob.values.indexOf(value) });

  // Show what the engine's own defaults are where the model or the GPU is another.
  function settle(sizes) {
    const mine = turned();
    for (const [name, value] of Object.entries(sizes ?? {})) {
      const knob = knobs.find((one) => one.name === name);
      if (!knob || name in mine || knob.value === value) continue;
      if (!offerValue(knob, value)) knob.values = [...knob.values, value];
      knob.value = value;
      const control = byId(`knob-${name}`);
      slide(knob, control, value);
      tell(knob, control.closest(".knob-row"), control);
    }
  }

  const valueOf = (knob, control) => (knob.menu ? control.value : knob.values[Number(control.value)]);

  function tell(knob, row, control) {
    const value = valueOf(knob, control);
    row.classList.toggle("turned", value !== knob.value);
    if (knob.menu) return;
    const text = typeof value === "string" ? value : digits.format(value);
    row.querySelector(".typed").value = text;
    control.setAttribute("aria-valuetext", text);
  }

  function turned() {
    const found = {};
    for (const knob of knobs) {
      const value = valueOf(knob, byId(`knob-${knob.name}`));
      if (value !== knob.value) found[knob.name] = value;
    }
    return found;
  }

  // Turn all knobs to values, or to the scenario's; return what cannot be had, in words.
  function turn(values) {
    const wrong = Object.keys(values).filter((name) => !knobs.some((knob) => knob.name === name)).map((name) => `there is no knob ${name.slice(0, 40)}`);
    for (const knob of knobs) {
      let value = knob.name in values ? values[knob.name] : knob.value;
      if (!offerValue(knob, value)) {
        wrong.push(`${knob.label} has no ${String(value).slice(0, 40)}`);
        value = knob.value;
      }
      const control = byId(`knob-${knob.name}`);
      if (knob.menu) control.value = value;
      else slide(knob, control, value);
      tell(knob, control.closest(".knob-row"), control);
    }
    return wrong;
  }

  // Runs.

  async function* ask(address, signal, more = {}) {
    const response = await fetch(address, { method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify({ knobs: turned(), trace, ...more }) });
    if (!response.ok) {
      yield { errors: (await response.json()).errors, last: true };
      return;
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const lines = text.split("\n");
      text = lines.pop();
      for (const line of lines) yield JSON.parse(line);
    }
  }

  function say(text, errors = []) {
    byId("status").textContent = text;
    headline();
    byId("errors").replaceChildren(...wrongs(errors));
  }

  // An error by the knob that it is of, not by a line of a file that nobody here chose; a press turns what would do.
  const GPUS = /engine\.tensor_parallel_size=(\d+) gpu\.count=\1/g;
  function wrongs(errors) {
    return errors.map((error) => {
      const text = error.replace(/^.*?\.ya?ml:\d+: (?:([\w.]+): )?/, (_, key) => {
        const known = key && knobs.find(({ name }) => [key, `${key}.name`].includes(start.keys[name]));
        return key ? `${known?.label ?? key}: ` : "";
      });
      const item = finding({ text: text.replace("`headway plan --buy`", `the plan "${start.questions.buy}"`).replace(GPUS, "GPUs of a replica $1") });
      const fits = [...error.matchAll(GPUS)].filter(({ 0: words, index }) => !/^ \w+\./.test(error.slice(index + words.length)));
      if (fits.length) item.append(...finding({ text: "", turn: { gpus: Number(fits[0][1]) } }).childNodes);
      return item;
    });
  }

  const whose = () => file || start.name;

  // Say of a chosen file that it is not played: results are of another, and there is no plan of it.
  function notPlayed(name, reason = "") {
    [unread, why] = [name, reason];
    byId("no-log").hidden = !(file || unread);
    byId("whose").textContent = unread ? `All below is of ${whose()}, not of ${unread}: ${why}` : "";
    tellLast();
    mayPlan();
  }

  // On a narrow page: what came of a knob, in sight of it.
  function headline() {
    const found = HEADLINE.filter(([key]) => current?.figures[key] != null).map(([key, label, scale, unit]) => `${label}${show(current.figures[key] * scale)} ${unit}`);
    byId("headline-status").textContent = unread ? `${whose()}, not ${unread}: ${why}` : byId("status").textContent;
    byId("headline-figures").textContent = found.join(" · ");
    byId("headline-figures").classList.toggle("stale", byId("shown").classList.contains("old"));
  }

  // What is shown stays until there is something newer, and says what it is of.
  function tellLast() {
    const old = Boolean(current) && current.words !== describe();
    byId("last-told").textContent = old ? `Below is the last result: ${current.words}.` : "";
    byId("last-told").hidden = !old;
    byId("shown").classList.toggle("old", old || Boolean(unread));
    headline();
  }

  const items = (texts) => texts.map((text) => Object.assign(document.createElement("li"), { textContent: text }));

  async function run() {
    under?.abort();
    const mine = (under = new AbortController());
    const begun = performance.now();
    const before = full;
    byId("cancel").disabled = false;
    document.querySelector(".results").setAttribute("aria-busy", "true");
    say("Simulating");
    tellLast();
    history.replaceState(null, "", link());
    const words = describe();
    try {
      for await (const answer of ask("/run", mine.signal)) {
        if (mine !== under) return;
        if (answer.errors) say("This cannot be run", answer.errors);
        else if (!answer.cancelled) {
          ghost = before;
          current = { ...answer, words };
          byId("shown").hidden = false;
          tellLast();
          if (!answer.coarse) full = current;
          settle(answer.sizes);
          const seconds = ((performance.now() - begun) / 1000).toFixed(2);
          const what = answer.coarse ? `A first look: ${digits.format(answer.requests)} requests` : `${digits.format(answer.requests)} requests`;
          say(`${what}, after ${seconds} s${answer.coarse ? "; the rest is on its way" : ""}`);
          byId("status").dataset.runs = Number(byId("status").dataset.runs ?? 0) + (answer.coarse ? 0 : 1);
          draw();
          headline();
        }
      }
    } catch (error) {
      if (mine === under && error.name !== "AbortError") say(SILENT, [String(error)]);
    }
    if (mine !== under) return;
    idle();
  }

  function idle() {
    under = null;
    byId("cancel").disabled = true;
    document.querySelector(".results").removeAttribute("aria-busy");
    tellLast();
  }

  // Say what is turned, with units; a search for the largest load tries rates of its own.
  const settings = (question) => Object.entries(turned()).filter(([name]) => question !== "rate" || !name.startsWith("rate")).map(([name, value]) => {
    const [label, unit] = knobs.find((knob) => knob.name === name).label.split(", ");
    return `${label} ${value}${unit && typeof value === "number" ? ` ${unit}` : ""}`;
  }).join(", ");
  const describe = () => [file, settings()].filter(Boolean).join(", ") || "as the scenario is";

  // What is shown.

  function shown() {
    const found = pins.map(({ run: pinned, hue }) => ({ run: pinned, hue: css(`--run-${hue}`), label: pinned.words, pin: pinned }));
    if (ghost && ghost !== current) found.unshift({ run: ghost, hue: css("--faint"), label: "before", dash: [5, 4] });
    if (current) found.unshift({ run: current, hue: css("--run-0"), label: "now" });
    return found;
  }

  function draw() {
    const runs = shown();
    figures(runs);
    drawn.forEach(([plot]) => plot.destroy());
    drawn = [];
    const above = runs.toReversed(); // what is drawn last is seen: now
    for (const name of ["ttft", "tpot", "e2el"]) cdf(above, name);
    traffic(current?.traffic);
    for (const [name, title] of [["arrivals", "Requests per second"], ["prompts", "Input tokens per second"]]) level(above, name, title, "traffic");
    for (const [name, title] of [["running", "Requests in the batch"], ["waiting", "Requests waiting"], ["kv", "KV blocks in use, %"], ["tokens", "Output tokens per second"]]) level(above, name, title);
    for (const list of document.querySelectorAll("figure ul")) list.replaceChildren();
    const found = (current?.advice ?? []).map((one) => [byId(`chart-${CHARTS[one.rule]}`)?.querySelector("ul"), finding(one)]);
    byId("advice").replaceChildren(...found.filter(([list]) => !list).map(([, item]) => item));
    for (const [list, item] of found) list?.append(item);
  }

  // A finding with its knob: a press turns it, or asks the plan.
  function finding({ text, knob, turn: to, plan }) {
    const [item] = items([text]);
    const press = (label, act) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: label });
      button.addEventListener("click", act);
      item.append(" ", button);
    };
    if (knob) item.append(" ", Object.assign(document.createElement("span"), { className: "knob", textContent: knob }));
    for (const [name, value] of Object.entries(to ?? {})) {
      const known = knobs.find((one) => one.name === name);
      if (known && offerValue(known, value)) press(`Turn ${known.label} to ${value}`, () => { turn({ ...turned(), [name]: value }); run(); });
    }
    if (plan) press("Plan what keeps it", () => { byId("question").value = "buy"; byId("plan").click(); byId("plan-box").scrollIntoView(); });
    return item;
  }

  // Say what all the traffic is like, in the words of `headway trace describe`.
  function traffic(found) {
    if (!found) return;
    const lengths = ({ mean, p99 }) => `mean ${show(mean)}, P99 ${show(p99)}`;
    const [per, unit] = unitOf(found.span_s);
    const told = [
      `${digits.format(found.requests)} requests over ${show(found.span_s / per)} ${unit}`, found.request_rate == null ? "all at once" : `${show(found.request_rate)} requests/s`,
      `input tokens ${lengths(found.input_len)}`, `output tokens ${lengths(found.output_len)}`,
    ];
    if (found.prefix_sharing != null) told.push(`${show(100 * found.prefix_sharing)} % of input tokens shared with an earlier prompt`);
    byId("traffic-told").textContent = told.join("; ");
  }

  const unitOf = (seconds) => (seconds >= 7200 ? [3600, "h"] : seconds >= 300 ? [60, "min"] : [1, "s"]);

  // The latencies that are bounded for one client or priority, by their labels.
  const partsOf = ({ parts }) => Object.fromEntries(Object.entries(parts).flatMap(([bound, value]) => {
    const found = /^(.+):([^_]+)_([^_]+)_ms/.exec(bound);
    return found ? [[`${found[1]}: ${found[2].toUpperCase()} ${found[3].toUpperCase()}, ms`, value]] : [];
  }));

  function figures(runs) {
    const head = document.createElement("tr");
    head.append(document.createElement("th"), ...runs.map(({ label, hue, pin }) => {
      const cell = document.createElement("th");
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = hue;
      cell.append(swatch, label);
      if (pin) {
        const button = Object.assign(document.createElement("button"), { type: "button", className: "unpin", textContent: "×", title: "Unpin" });
        button.setAttribute("aria-label", `Unpin ${label}`);
        button.addEventListener("click", () => { pins.splice(pins.findIndex(({ run: one }) => one === pin), 1); draw(); });
        cell.append(button);
      }
      return cell;
    }));
    const ofParts = [...new Set(runs.flatMap(({ run: one }) => Object.keys(partsOf(one))))].map((label) => [label, label, 1]);
    const value = (one, key) => one.figures[key] ?? partsOf(one)[key];
    const rows = [...FIGURES, ...ofParts].filter(([key]) => runs.some(({ run: one }) => value(one, key) != null)).map(([key, label, scale]) => {
      const row = document.createElement("tr");
      row.dataset.key = key;
      row.append(Object.assign(document.createElement("th"), { textContent: label }), ...runs.map(({ run: one }) => {
        const shown = value(one, key);
        return Object.assign(document.createElement("td"), { textContent: show(shown == null ? null : shown * scale) });
      }));
      return row;
    });
    byId("figures").replaceChildren(head, ...rows);
    byId("figures").classList.toggle("stale", Boolean(current?.coarse));
  }

  function figureIn(box, key, title) {
    let made = byId(`chart-${key}`);
    if (!made) {
      made = document.createElement("figure");
      made.id = `chart-${key}`;
      made.append(document.createElement("figcaption"), Object.assign(document.createElement("div"), { className: "chart" }), document.createElement("ul"));
      made.firstChild.append(Object.assign(document.createElement("b"), { textContent: title }));
      byId(box).append(made);
    }
    return made.querySelector(".chart");
  }

  const font = "12px system-ui, sans-serif";
  function plot(node, runs, tables, x, y, hooks) {
    const look = { stroke: css("--faint"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font };
    const values = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const series = runs.map(({ label, hue, dash }) => ({ label, stroke: hue, width: 1.6, dash, spanGaps: true, points: { show: false }, value: (u, v) => show(v) }));
    const options = {
      width: node.clientWidth, height: 210,
      scales: { x: { time: false, ...x.scale }, y: { range: (u, low, high) => [0, y.top ?? (high * 1.05 || 1)] } },
      axes: [{ ...look, size: 32, ...x.axis }, { ...look, size: 54, values: (u, all) => all.map((v) => (v == null ? "" : show(v))) }],
      cursor: { drag: { x: true, y: false } }, legend: { show: false },
      series: [{}, ...series], hooks,
    };
    drawn.push([new uPlot(options, values, node), node]);
  }

  function cdf(runs, name) {
    const node = figureIn("latency", name, `${name.toUpperCase()}, ms: % of requests`);
    const known = runs.filter(({ run: one }) => one.cdf[name].ms.length);
    if (!known.length) return;
    const low = Math.min(...known.map(({ run: one }) => one.cdf[name].ms[0]));
    const high = Math.max(...known.map(({ run: one }) => one.cdf[name].ms.at(-1)));
    const log = high > 4 * low;
    const decades = () => {
      const found = [];
      for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) found.push(...(high / low > 200 ? [power] : [power, 2 * power, 5 * power]));
      const shown = found.filter((tick) => tick >= low && tick <= high);
      const every = Math.ceil(shown.length / Math.max(2, Math.floor((node.clientWidth - 54) / 72))); // so that labels do not touch
      return shown.filter((tick, k) => k % every === 0);
    };
    const axis = log ? { filter: (u, all) => all, splits: decades, values: (u, all) => all.map(show) } : {};
    const bound = current?.bounds[name];
    const hooks = { draw: [(u) => {
      if (bound == null || bound < low || bound > high) return;
      const { ctx, bbox } = u;
      const at = u.valToPos(bound, "x", true);
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = css("--bad");
      ctx.setLineDash([6, 4]);
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
      ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
      const right = at > bbox.left + bbox.width / 2; // where the curve is near its end, else near its start
      ctx.textAlign = right ? "right" : "left";
      const text = ` SLO ${show(bound)} ms `;
      const base = right ? bbox.top + bbox.height - 8 * devicePixelRatio : bbox.top + 14 * devicePixelRatio;
      const wide = ctx.measureText(text).width;
      ctx.fillStyle = css("--paper"); // under the words, where a curve passes
      ctx.fillRect(right ? at - wide : at + devicePixelRatio, base - 11 * devicePixelRatio, wide - devicePixelRatio, 14 * devicePixelRatio);
      ctx.fillStyle = css("--bad");
      ctx.fillText(text, at, base);
      ctx.restore();
    }] };
    plot(node, known, known.map(({ run: one }) => [one.cdf[name].ms, one.cdf[name].percent[0]]), { scale: { distr: log ? 3 : 1, range: () => [low, high] }, axis }, { top: 100 }, hooks);
  }

  function level(runs, name, title, box = "levels") {
    const node = figureIn(box, name, title);
    const [per, unit] = unitOf(Math.max(...runs.map(({ run: one }) => one.time.at(-1))));
    plot(node, runs, runs.map(({ run: one }) => [one.time.map((at) => at / per), one.levels[name]]), { scale: {}, axis: { values: (u, all) => all.map((v) => `${digits.format(v)} ${unit}`) } }, {}, {});
  }

  // Actions.

  // A link has the knobs, and of an uploaded trace the name alone.
  function link() {
    const values = file ? { ...turned(), trace: file } : turned();
    const there = Object.keys(values).length;
    return `${location.pathname}${there ? `#${encodeURIComponent(JSON.stringify(values))}` : ""}`;
  }

  function follow() {
    const told = [];
    let values = {};
    waiting = {};
    try {
      const text = decodeURIComponent(location.hash.slice(1));
      if (/^\w+=/.test(text)) { // as people write it: rate=5&seats=64
        const number = (value) => (value.trim() && !Number.isNaN(Number(value)) ? Number(value) : value);
        for (const [name, value] of new URLSearchParams(text)) values[name] = number(value);
      } else if (text) values = JSON.parse(text);
      if (values === null || typeof values !== "object" || Array.isArray(values)) throw new TypeError();
    } catch {
      values = {};
      told.push("This link is damaged: the scenario is shown as it is");
    }
    const { trace: named, ...others } = values;
    if (named && named !== file) {
      told.push(`This link is of the trace ${String(named).slice(0, 80)}, which a link cannot carry: choose the file`);
      waiting = { ...others }; // all of them: what is the scenario's own here may be another of the trace
      for (const name of Object.keys(others)) if (!knobs.some((knob) => knob.name === name)) delete others[name];
    }
    told.push(...turn(others).map((text) => `This link is not followed in full: ${text}`));
    byId("link-told").textContent = told.join("; ");
  }

  const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

  async function copy(text, what, hint = "") {
    const shown = byId("copied-text");
    try {
      await navigator.clipboard.writeText(text);
      byId("copied").textContent = `${what} copied. ${hint}`;
      shown.hidden = true;
    } catch { // no clipboard
      byId("copied").textContent = `${what}, to be copied from here. ${hint}`;
      shown.textContent = text;
      shown.hidden = false;
    }
    byId("copied").dataset.text = text;
  }

  byId("cancel").addEventListener("click", () => { under?.abort(); say("Cancelled"); idle(); });
  byId("pin").addEventListener("click", () => {
    if (!full || pins.some(({ run: one }) => one === full)) return;
    if (pins.length >= MOST_PINS) { byId("copied").textContent = `${MOST_PINS} are pinned: unpin one first`; return; }
    const hue = [1, 2, 3, 4].find((number) => !pins.some((pin) => pin.hue === number));
    pins.push({ run: full, hue });
    draw();
  });
  byId("headline").addEventListener("click", () => document.querySelector(".results").scrollIntoView({ block: "start" }));
  byId("copy-yaml").addEventListener("click", () => copy(current?.yaml ?? "", "YAML", beside()));
  byId("copy-cli").addEventListener("click", () => {
    const extra = (current?.settings ?? []).slice((start.command.length - 3) / 2);
    copy([...start.command, ...extra.flatMap((setting) => ["--set", setting])].map(quoted).join(" "), "Command", beside());
  });

  function save(name, text) {
    const anchor = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([text], { type: "text/html" })), download: name });
    anchor.click();
    setTimeout(() => URL.revokeObjectURL(anchor.href), 60000);
    byId("copied").textContent = `${name} saved: one file, which opens in any browser.`;
  }

  // Ask for something that takes the place of a run.
  async function instead(address, doing, wrong, done) {
    under?.abort();
    const mine = (under = new AbortController());
    byId("cancel").disabled = false;
    say(doing);
    try {
      for await (const answer of ask(address, mine.signal)) {
        if (mine !== under) return;
        if (answer.errors) say(wrong, answer.errors);
        else if (!answer.cancelled) done(answer);
      }
    } catch (error) {
      if (mine === under && error.name !== "AbortError") say(SILENT, [String(error)]);
    }
    if (mine === under) idle();
  }

  byId("save-page").addEventListener("click", () => instead("/page", "Making the page", "There is no page of this", ({ page }) => {
    save(`${title}.html`, page);
    say("The page is made");
  }));

  // Plans.

  let planning = null, planned = null; // the plan under way; the last answer
  byId("question").append(...Object.entries(start.questions).map(([name, label]) => new Option(label, name)));

  function mayPlan() {
    byId("plan").disabled = Boolean(planning || unread);
    byId("plan").title = unread ? `${unread} is not played: ${why}` : "";
  }

  byId("plan").addEventListener("click", async () => {
    const mine = (planning = new AbortController());
    const begun = performance.now();
    const question = byId("question").value;
    const asked = `${start.questions[question]}: ${whose()}, ${settings(question) || "as it is"}`;
    const [named, called] = [file, title]; // the log of this plan: another may be chosen while it looks
    let told = "";
    const status = (text) => { byId("plan-status").textContent = text; };
    const after = () => `${Math.round((performance.now() - begun) / 1000)} s`;
    const look = () => status(`Looking for ${after()}: ${asked}. ${told}`);
    const earlier = () => (planned ? ". Below is the earlier answer" : "");
    mayPlan();
    byId("plan-cancel").disabled = false;
    byId("plan-box").hidden = false;
    byId("plan-errors").replaceChildren();
    const clock = setInterval(look, 1000);
    look();
    try {
      for await (const answer of ask("/plan", mine.signal, { question })) {
        if (answer.errors) {
          status(`There is no answer: ${asked}${earlier()}`);
          byId("plan-errors").replaceChildren(...wrongs(answer.errors));
        } else if (answer.last) {
          planned = { ...answer, file: named, called };
          byId("plan-title").textContent = asked;
          byId("plan-answer").hidden = false;
          byId("plan-lines").textContent = answer.text;
          byId("plan-best").innerHTML = answer.answer ?? ""; // the server's own HTML, escaped there
          byId("plan-table").innerHTML = answer.table ?? "";
          byId("plan-yaml").disabled = !answer.yaml;
          byId("plan-page").disabled = !answer.page;
          status(`Found after ${after()}`);
        } else { told = answer.told; look(); }
      }
    } catch (error) {
      if (error.name === "AbortError") status(`Cancelled: ${asked}${earlier()}`);
      else { status(`${SILENT}${earlier()}`); byId("plan-errors").replaceChildren(...items([String(error)])); }
    }
    clearInterval(clock);
    planning = null;
    mayPlan();
    byId("plan-cancel").disabled = true;
  });
  byId("plan-cancel").addEventListener("click", () => planning?.abort());
  const besidePlan = () => beside(planned.file);
  byId("plan-yaml").addEventListener("click", () => copy(planned.yaml, "The plan's scenario", besidePlan()));
  byId("plan-cli").addEventListener("click", () => copy(planned.command.map(quoted).join(" "), "The plan's command", besidePlan()));
  byId("plan-page").addEventListener("click", () => save(`${planned.called}-plan.html`, planned.page));
  byId("copy-link").addEventListener("click", () => copy(new URL(link(), location.href).href, "Link", file ? `It brings the knobs; ${file} must be chosen again, since a link cannot carry it.` : ""));
  const beside = (name = file) => (name ? `It names ${name}: that must be in the folder where it is used.` : "");
  byId("reset").addEventListener("click", () => { waiting = {}; byId("link-told").textContent = ""; turn({}); for (const note of document.querySelectorAll(".wrong")) note.textContent = ""; run(); });
  byId("no-log").addEventListener("click", () => { knobs = start.knobs; trace = file = ""; title = start.name; head(); waiting = {}; for (const name of ["trace-told", "link-told"]) byId(name).textContent = ""; byId("trace").value = ""; offer([], ""); build(); notPlayed(""); run(); });

  // Offer the columns of a file to choose from; `columns`: which holds what, at first.
  function offer(names, columns) {
    byId("columns-row").hidden = !names.length;
    byId("columns").value = columns;
    for (const select of choices) {
      const none = { arrival: "none: all at once", client: "none: all alike", priority: "none: all alike" }[select.dataset.field] ?? "choose";
      select.replaceChildren(new Option(none, ""), ...names.map((name) => new Option(name, name)));
    }
    choose();
  }

  const choices = [...document.querySelectorAll("#columns-row select")];
  const pairs = (text) => new Map(text.split(",").filter((part) => part.trim()).map((part) => part.trim().split(/\s*=\s*/)));
  const choose = () => { const given = pairs(byId("columns").value); for (const select of choices) select.value = (given.get(select.dataset.field) ?? "").replace(/:(sec|seconds|s|ms|us|ns)$/, ""); };

  async function upload(chosenColumns) {
    const chosen = byId("trace").files[0];
    if (!chosenColumns) offer([], "");
    if (!chosen) { notPlayed(""); return; }
    const refuse = (reason, status, errors) => { notPlayed(chosen.name, reason); say(status, errors); };
    under?.abort();
    idle();
    if (chosen.size > start.most_bytes) { refuse("it is too large", "This trace cannot be played", [`${chosen.name}: has more than ${start.most_bytes / 2 ** 20} MiB`]); return; }
    refuse("it is being read", `Reading ${chosen.name}`);
    let answer;
    try {
      const response = await fetch(`/trace?${new URLSearchParams({ name: chosen.name, columns: chosenColumns })}`, { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: chosen });
      answer = await response.json();
    } catch (error) {
      if (chosen === byId("trace").files[0]) refuse("it could not be read", SILENT, [String(error)]);
      return;
    }
    if (chosen !== byId("trace").files[0]) return; // another was chosen meanwhile
    if (answer.names && !answer.trace) {
      offer(answer.names, answer.columns);
      refuse("choose the columns", `Which columns of ${chosen.name} have what? Choose, and press Read it so`, answer.errors);
      return;
    }
    if (answer.errors) { refuse("it cannot be played", "This trace cannot be played", answer.errors); return; }
    const kept = { ...waiting, ...turned() };
    const lost = knobs.filter(({ name }) => name in kept && !answer.knobs.some((knob) => knob.name === name));
    for (const { name } of lost) delete kept[name];
    [trace, file, title, knobs, waiting] = [answer.trace, chosen.name, answer.name, answer.knobs, {}];
    head();
    const own = lost.length ? ` Its own now: ${lost.map(({ label }) => label).join("; ")}.` : "";
    const { names, failed, notes, columns } = answer;
    const unused = [...columns.without_effect, ...columns.not_understood];
    const choice = unused.length ? names : [];
    const more = unused.length > MOST_UNUSED ? ` and ${unused.length - MOST_UNUSED} more` : "";
    const left = unused.length ? ` Without effect: ${unused.slice(0, MOST_UNUSED).join(", ")}${more}${choice.length ? "; choose above what has an effect, and press Read it so" : ""}.` : "";
    const given = pairs(chosenColumns); // with their units, as ts:ms
    offer(choice, Object.entries(columns.used).map(([name, field]) => `${field}=${given.get(field) ?? name}`).join(","));
    byId("trace-told").textContent = `Plays ${file}.${own}${left}${[...(failed ? [`${failed} requests are left out: they failed or were cancelled when recorded, or have no output tokens`] : []), ...notes].map((note) => ` ${note}.`).join("")}`;
    byId("link-told").textContent = "";
    build();
    turn(kept);
    notPlayed("");
    run();
  }

  byId("trace").addEventListener("change", () => upload(""));
  byId("columns").addEventListener("input", choose);
  for (const select of choices) select.addEventListener("change", () => {
    const found = pairs(byId("columns").value);
    if (select.value) found.set(select.dataset.field, select.value);
    else found.delete(select.dataset.field);
    byId("columns").value = [...found].map((pair) => pair.join("=")).join(",");
  });
  byId("read-columns").addEventListener("click", () => upload(byId("columns").value));
  addEventListener("themechange", () => current && draw());
  addEventListener("resize", () => drawn.forEach(([one, node]) => one.setSize({ width: node.clientWidth, height: one.height })));

  addEventListener("hashchange", () => { follow(); run(); });

  head();
  build();
  follow();
  run();
})();
