// The step player: one or several runs of a step on one time axis, which can be played, stepped and scrubbed; with
// `data.choose` one run at a time, chosen by buttons.
// `player.py` fills in the data. Without this script a page shows the still picture in its place.
(function (data) {
  "use strict";
  const WIDEST = 960, LEFT = 100, RIGHT = 12, LANE = 24, TITLE = 22, MEMORY = 34, AXIS = 30, PLAY_S = 10;
  const SVG = "http://www.w3.org/2000/svg";
  const INK = "#2b2b2b", QUIET = "#6b6b66", CARD = "#fbfbf8", OTHER = "#a8a8a2";

  function add(parent, name, attributes, text) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  function html(parent, name, css, text = "") {
    const node = document.createElement(name);
    node.style.cssText = css;
    node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  function press(parent, name, label, action) {
    const css = `min-width:2.2em;min-height:24px;color:${INK};background:#fff;border:1px solid ${QUIET};border-radius:4px`;
    const node = html(parent, "button", css, name);
    node.type = "button";
    if (label) {
      node.title = label;
      node.setAttribute("aria-label", label);
    }
    node.addEventListener("click", action);
    return node;
  }

  const time = (seconds) => `${(seconds * data.scale).toFixed(2)} ${data.time_unit}`;

  function size(bytes) {
    for (const [unit, one] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
      if (bytes >= one) return `${(bytes / one).toFixed(1)} ${unit}`;
    return `${bytes} B`;
  }

  const color = (unit) => (unit in data.colors ? data.colors[unit] : OTHER);

  function words(span) {
    const parts = [`${span.kind.replace("_", "-")} ${span.unit}`.trim(), span.phase];
    if (span.bytes) parts.push(size(span.bytes));
    parts.push(`${time(span.start)} to ${time(span.end)}`);
    return parts.join(" · ");
  }

  // the value of a line through points [moment, value] at a moment
  function at(points, moment) {
    let value = 0;
    for (let i = 0; i < points.length && points[i][0] <= moment; i++) {
      value = points[i][1];
      const next = points[i + 1];
      if (next && next[0] > moment)
        value += ((next[1] - value) * (moment - points[i][0])) / (next[0] - points[i][0]);
    }
    return value;
  }

  function build(root) {
    root.dataset.lmSuppressShortcuts = "true"; // JupyterLab would take the arrow keys
    root.style.cssText =
      `background:${CARD};color:${INK};padding:8px;border-radius:4px;font:13px system-ui,sans-serif;max-width:1000px`;
    const width = Math.min(WIDEST, Math.max(root.clientWidth - 16, 300)); // letters keep their size on a phone
    root.replaceChildren();
    if (!data.choose) draw(root, data.runs, width);
    else {
      const row = html(root, "div", "display:flex;gap:8px;flex-wrap:wrap;margin-bottom:6px");
      row.setAttribute("role", "group");
      row.setAttribute("aria-label", "what to show");
      const place = html(root, "div", "");
      let stop = () => {};
      const choose = (chosen) => {
        stop();
        stop = draw(place, [data.runs[chosen]], width);
        buttons.forEach((node, i) => {
          node.setAttribute("aria-pressed", i === chosen);
          node.style.background = i === chosen ? "#dcdcd4" : "#fff";
        });
      };
      const buttons = data.runs.map((run, i) => press(row, run.title, "", () => choose(i)));
      choose(0);
    }
    root.dataset.ready = "yes";
  }

  // draws runs into a place and returns how to stop the clock
  function draw(root, runs, WIDTH) {
    const id = `${data.id}-${data.runs.indexOf(runs[0])}`;
    const x = (seconds) => LEFT + (WIDTH - LEFT - RIGHT) * (seconds / data.until);
    root.replaceChildren();
    const height = runs.reduce((sum, run) => sum + TITLE + run.lanes.length * LANE + MEMORY, 0) + AXIS;
    const svg = add(root, "svg", { viewBox: `0 0 ${WIDTH} ${height}`, width: "100%", role: "img" });
    svg.setAttribute("aria-label", data.alt);
    const defs = add(svg, "defs", {});
    for (const unit of ["", ...Object.keys(data.colors)]) {
      const index = Object.keys(data.colors).indexOf(unit);
      const pattern = add(defs, "pattern", {
        id: `${id}-${index}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)",
      });
      add(pattern, "rect", { width: 6, height: 6, fill: color(unit) });
      add(pattern, "rect", { width: 2.5, height: 6, fill: CARD });
    }
    const hatch = (unit) => `url(#${id}-${Object.keys(data.colors).indexOf(unit)})`;

    const bars = [], held = [];
    let top = 0;
    for (const run of runs) {
      add(svg, "text", { x: LEFT, y: top + 15, "font-weight": "bold", fill: INK, "font-size": 13 }, run.title);
      top += TITLE;
      run.lanes.forEach((lane, i) =>
        add(svg, "text", { x: LEFT - 8, y: top + i * LANE + 16, "text-anchor": "end", fill: INK, "font-size": 12 }, lane));
      for (const span of run.spans) {
        const bar = add(svg, "rect", {
          class: "span", x: x(span.start), y: top + span.lane * LANE + 2, height: LANE - 4,
          width: Math.max(x(span.end) - x(span.start), 2),
          fill: span.gradients ? hatch(span.unit) : color(span.unit), tabindex: -1,
        });
        for (const event of ["mouseenter", "focus", "click"]) bar.addEventListener(event, () => tell(words(span)));
        bars.push({ bar, span });
      }
      top += run.lanes.length * LANE;
      add(svg, "text", { x: LEFT - 8, y: top + 15, "text-anchor": "end", fill: QUIET, "font-size": 12 }, "holds");
      const units = Object.keys(run.held), wide = (WIDTH - LEFT - RIGHT) / Math.max(units.length, 1);
      units.forEach((unit, i) => {
        const place = { x: LEFT + i * wide, y: top + 3, height: 9 }, full = Math.max(wide - 8, wide / 2);
        add(svg, "rect", { ...place, width: full, fill: "none", stroke: color(unit) });
        const parameters = add(svg, "rect", { ...place, width: 0, fill: color(unit) });
        const gradients = add(svg, "rect", { ...place, y: top + 14, height: 6, width: 0, fill: hatch(unit) });
        if (wide > 7 * unit.length + 8)
          add(svg, "text", { x: place.x + 2, y: top + 31, fill: QUIET, "font-size": 10 }, unit);
        held.push({ parameters, gradients, points: run.held[unit], wide: full });
      });
      top += MEMORY;
    }
    for (let i = 0, ticks = WIDTH > 600 ? 4 : 2; i <= ticks; i++) {
      const moment = (data.until * i) / ticks, anchor = i === ticks ? "end" : i ? "middle" : "start";
      add(svg, "line", { x1: x(moment), x2: x(moment), y1: top, y2: top + 5, stroke: QUIET });
      add(svg, "text", { x: x(moment), y: top + 18, "text-anchor": anchor, fill: QUIET, "font-size": 11 }, time(moment));
    }
    const head = add(svg, "line", { class: "head", y1: 0, y2: top, stroke: INK, "stroke-width": 1.5 });

    // ---- controls
    const row = html(root, "div", "display:flex;gap:8px;align-items:center;flex-wrap:wrap;margin-top:4px");
    const moments = [...new Set(runs.flatMap((run) => run.spans.flatMap((s) => [s.start, s.end])))];
    moments.sort((a, b) => a - b);
    press(row, "|◀", "one event back", () => { stop(); show(moments.filter((m) => m < now - 1e-12).pop() ?? 0); });
    const playing = press(row, "▶", "play or pause", () => (timer ? stop() : play()));
    press(row, "▶|", "one event on", () => { stop(); show(moments.find((m) => m > now + 1e-12) ?? data.until); });
    const scrub = html(row, "input", "flex:1;min-width:120px");
    Object.assign(scrub, { type: "range", min: 0, max: 1000, value: 0 });
    scrub.setAttribute("aria-label", "moment of the step");
    scrub.addEventListener("input", () => { stop(); show((scrub.value / 1000) * data.until); });
    const speed = html(row, "select", "min-height:24px");
    speed.setAttribute("aria-label", "speed");
    for (const factor of [0.25, 0.5, 1, 2, 4])
      Object.assign(html(speed, "option", "", `${factor} ×`), { value: factor, selected: factor === 1 });
    const line = html(root, "div", "min-height:1.4em;margin-top:4px");
    line.className = "told";
    const tell = (text) => { line.textContent = text; };

    // ---- time
    let now = 0, timer = 0, before = 0;
    function show(moment) {
      now = Math.min(Math.max(moment, 0), data.until);
      head.setAttribute("x1", x(now));
      head.setAttribute("x2", x(now));
      scrub.value = (1000 * now) / data.until;
      scrub.setAttribute("aria-valuetext", time(now));
      for (const { bar, span } of bars) bar.setAttribute("opacity", span.start <= now ? 1 : 0.25);
      for (const unit of held) {
        unit.parameters.setAttribute("width", unit.wide * at(unit.points.parameters, now));
        unit.gradients.setAttribute("width", unit.wide * at(unit.points.gradients, now));
      }
      const running = runs.map((run) =>
        run.spans.filter((s) => s.start <= now && now < s.end)
          .map((s) => `${s.kind.replace("_", "-")} ${s.unit}`.trim()).join(", ") || "nothing");
      tell([time(now), ...running].join(" | "));
    }
    function tick(moment) {
      show(now + ((moment - before) / 1000) * (data.until / PLAY_S) * Number(speed.value));
      before = moment;
      if (now < data.until && root.isConnected) timer = requestAnimationFrame(tick);
      else stop();
    }
    function play() {
      if (now >= data.until) show(0);
      playing.textContent = "❚❚";
      before = performance.now();
      timer = requestAnimationFrame(tick);
    }
    function stop() {
      cancelAnimationFrame(timer);
      timer = 0;
      playing.textContent = "▶";
    }
    show(0);
    return stop;
  }

  for (const root of document.querySelectorAll(`[data-player="${data.id}"]:not([data-ready])`)) build(root);
})
