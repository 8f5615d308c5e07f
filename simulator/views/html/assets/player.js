"use strict";
// Plays films of batching: seats, chunks, KV blocks and the queue, step by step, side by side.
function mountPlayer(node, films) {
  const MOST_SEATS = 32, MOST_WAITING = 14, CELLS = 60;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const make = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const digits = new Intl.NumberFormat("en");
  const times = [...new Set(films.flatMap((film) => film.frames.map((frame) => frame.start)))].sort((a, b) => a - b);
  const end = Math.max(...films.map((film) => film.frames.at(-1)?.end ?? 0));
  const rows = Math.min(Math.max(...films.map((film) => film.seats)), MOST_SEATS);
  let place = 0, playing = null;

  node.replaceChildren();
  const controls = make("div", "player-controls");
  const button = (text, label, action) => {
    const made = make("button", "", text);
    made.type = "button";
    made.setAttribute("aria-label", label);
    made.addEventListener("click", action);
    controls.append(made);
    return made;
  };
  button("|◀", "Back to the start", () => { stop(); go(0); });
  button("◀", "A step back", () => { stop(); go(place - 1); });
  const play = button("Play", "Play or pause", () => (playing ? stop() : start()));
  button("▶", "A step on", () => { stop(); go(place + 1); });
  const speed = make("select");
  speed.setAttribute("aria-label", "Speed");
  for (const [value, text] of [[2, "2 steps/s"], [8, "8 steps/s"], [30, "30 steps/s"], [120, "120 steps/s"]]) {
    const option = make("option", "", text);
    option.value = value;
    speed.append(option);
  }
  speed.value = "8";
  speed.addEventListener("change", () => { if (playing) { stop(); start(); } });
  const slider = make("input");
  Object.assign(slider, { type: "range", min: 0, max: times.length - 1, value: 0 });
  slider.setAttribute("aria-label", "Step");
  slider.addEventListener("input", () => { stop(); go(Number(slider.value)); });
  const clock = make("output", "player-clock");
  controls.append(speed, slider, clock);
  const panels = make("div", "player-panels");
  node.append(controls, panels);

  const views = films.map((film) => {
    const panel = make("section", "player-panel");
    const part = (className) => { const made = make("div", className); panel.append(made); return made; };
    panel.append(make("h3", "", film.label));
    return { film, panel, waiting: part("player-waiting"), why: part("player-why"), seats: part("player-seats"), told: part("player-told"), cells: part("player-cells"), events: part("player-why") };
  });
  panels.append(...views.map((view) => view.panel));

  const hue = (id) => `hsl(${(id * 137.508) % 360} 45% ${(id >> 3) & 1 ? 20 : 31}%)`;
  function chip(id) {
    const made = make("span", "chip", id);
    made.style.background = hue(id);
    return made;
  }

  function frameAt(film, time) {
    let low = 0, high = film.frames.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (film.frames[middle].start <= time + 1e-12) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  function seat(film, found) {
    const row = make("div", "seat");
    if (!found) { row.classList.add("idle"); return row; }
    const [, id, doing, tokens] = found;
    const words = {
      prefill: `prefill ${digits.format(tokens)} of ${digits.format(film.prompts[id])} tokens`,
      decode: `decode: token ${digits.format(tokens)} of ${digits.format(film.outputs[id])}`,
      done: "done, keeps its seat", held: "no turn in this step",
    }[doing];
    const bar = make("div", `doing ${doing}`, words);
    if (doing === "decode") {
      const share = Math.min(100, (100 * tokens) / Math.max(film.outputs[id], 1));
      bar.style.backgroundImage = `linear-gradient(90deg, var(--slowed-soft) ${share}%, var(--decode) ${share}%)`;
    }
    row.append(chip(id), bar);
    return row;
  }

  function draw(view, time) {
    const { film } = view;
    const number = frameAt(film, time);
    const over = time >= (film.frames.at(-1)?.end ?? 0);
    const frame = over ? undefined : film.frames[number];
    view.panel.querySelector("h3").textContent = `${film.label}: ${over ? "all done" : frame ? `step ${number + 1} of ${film.frames.length}` : "nothing to do"}`;
    const waiting = frame?.waiting ?? [];
    view.waiting.replaceChildren(make("span", "", "Waiting: "), ...(waiting.length ? waiting.slice(0, MOST_WAITING).map(chip) : [make("span", "", "nobody")]));
    if (waiting.length > MOST_WAITING) view.waiting.append(make("span", "", ` +${waiting.length - MOST_WAITING}`));
    view.why.textContent = frame?.why || "\u00a0";
    const seats = new Map((frame?.seats ?? []).map((found) => [found[0], found]));
    view.seats.replaceChildren(...Array.from({ length: rows }, (_, k) => seat(film, seats.get(k))));
    const each = Math.ceil(film.blocks / CELLS);
    const used = frame ? film.blocks - frame.free : 0;
    view.told.textContent = `KV cache: ${digits.format(used)} of ${digits.format(film.blocks)} blocks${each > 1 ? ` (a cell: ${digits.format(each)})` : ""}`;
    const owners = Object.entries(frame?.blocks ?? {}).flatMap(([id, count]) => Array(Math.round(count / each)).fill(Number(id)));
    view.cells.replaceChildren(...Array.from({ length: Math.ceil(film.blocks / each) }, (_, k) => {
      const cell = make("i");
      if (k < owners.length) cell.style.background = hue(owners[k]);
      return cell;
    }));
    view.events.textContent = frame?.events.join(", ") || "\u00a0";
  }

  function go(to) {
    place = Math.max(0, Math.min(times.length, to));
    slider.value = place;
    const time = place === times.length ? end : times[place];
    clock.textContent = `${time.toFixed(3)} s`;
    node.dataset.place = place;
    views.forEach((view) => draw(view, time));
    if (place === times.length) stop();
  }

  function start() {
    if (place >= times.length) go(0);
    play.textContent = "Pause";
    playing = setInterval(() => go(place + 1), 1000 / Number(speed.value));
  }

  function stop() {
    clearInterval(playing);
    playing = null;
    play.textContent = "Play";
  }

  go(0);
}
