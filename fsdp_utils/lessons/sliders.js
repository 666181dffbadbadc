// Sliders: range inputs over a grid of results, and columns that are drawn anew for what they are set to.
// `sliders.py` fills in the data. Without this script a page shows the still picture in its place.
(function (data) {
  "use strict";
  const WIDTH = 960, HEIGHT = 300, LEFT = 64, RIGHT = 12, TOP = 34, BOTTOM = 44;
  const SVG = "http://www.w3.org/2000/svg";
  const INK = "#2b2b2b", QUIET = "#6b6b66", CARD = "#fbfbf8", FAINT = "#d9d9d4", LIMIT = "#B34700";
  const { axes, stack, scalars } = data;

  function add(parent, name, attributes, text) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  function html(parent, name, css, text) {
    const node = document.createElement(name);
    node.style.cssText = css;
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  const number = (value) => Number(value.toPrecision(3)).toLocaleString("en-US", { maximumFractionDigits: 6 });
  const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * Math.min(value, stack.upto)) / stack.upto;

  // the grid lies in rows, the last axis fastest
  const at = (places) => axes.reduce((index, axis, i) => index * axis.values.length + places[i], 0);
  const point = (index) => {
    const parts = stack.parts.map((_, i) => data.columns[i][index]);
    return {
      parts,
      missing: parts[0] === null,
      total: parts.reduce((sum, value) => sum + value, 0),
      scalars: scalars.map((_, i) => data.columns[stack.parts.length + i][index]),
      note: data.notes[data.note[index]],
    };
  };

  function build(root) {
    root.replaceChildren();
    root.dataset.lmSuppressShortcuts = "true"; // JupyterLab would take the arrow keys
    root.style.cssText =
      `background:${CARD};color:${INK};padding:8px;border-radius:4px;font:13px system-ui,sans-serif;max-width:1000px`;
    const places = axes.map((axis) => axis.start);
    const over = axes[data.over], wide = (WIDTH - LEFT - RIGHT) / over.values.length;

    const svg = add(root, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: "100%", role: "img" });
    add(svg, "text", { x: LEFT, y: 14, "font-weight": "bold", fill: INK, "font-size": 13 }, data.title);
    for (const tick of data.ticks) {
      add(svg, "line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick), stroke: FAINT });
      add(svg, "text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end", fill: QUIET, "font-size": 11 }, number(tick));
    }
    add(svg, "text", {
      transform: `translate(13 ${(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)`, "text-anchor": "middle", fill: INK, "font-size": 12,
    }, `${stack.name}, ${stack.unit}`);
    add(svg, "text", {
      x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle", fill: INK, "font-size": 12,
    }, over.unit ? `${over.name}, ${over.unit}` : over.name);
    const columns = over.values.map((value, place) => {
      const group = add(svg, "g", { class: "column", cursor: "pointer" });
      const x = LEFT + place * wide, mid = x + wide / 2;
      const marked = add(group, "rect", { x: x + 2, y: TOP - 16, width: wide - 4, height: HEIGHT - BOTTOM - TOP + 36, rx: 4 });
      const bars = stack.colors.map((fill) => add(group, "rect", { class: "part", x: x + wide * 0.22, width: wide * 0.56, fill }));
      const label = add(group, "text", { class: "total", x: mid, "text-anchor": "middle", fill: INK, "font-size": 11 });
      const name = add(group, "text", {
        x: mid, y: HEIGHT - BOTTOM + 15, "text-anchor": "middle", fill: INK, "font-size": 12,
      }, value);
      group.addEventListener("click", () => set(data.over, place));
      return { marked, bars, label, name };
    });
    if (stack.limit !== null) {
      add(svg, "line", {
        x1: LEFT, x2: WIDTH - RIGHT, y1: y(stack.limit), y2: y(stack.limit), stroke: LIMIT, "stroke-width": 1.5, "stroke-dasharray": "6 4",
      });
      add(svg, "text", {
        x: WIDTH - RIGHT, y: 14, "text-anchor": "end", fill: LIMIT, "font-size": 12,
      }, `– – ${stack.limit_name}: ${number(stack.limit)} ${stack.unit}`);
    }

    // ---- the sliders
    const grid = html(root, "div", "display:grid;grid-template-columns:repeat(auto-fit,minmax(250px,1fr));gap:4px 20px;margin-top:6px");
    const inputs = axes.map((axis, i) => {
      const label = html(grid, "label", "display:grid;grid-template-columns:1fr auto;gap:0 8px");
      html(label, "span", "", axis.name);
      const value = html(label, "output", "font-weight:bold");
      const input = html(label, "input", "grid-column:1/3;width:100%;margin:0");
      Object.assign(input, { type: "range", min: 0, max: axis.values.length - 1, step: 1, value: axis.start });
      input.setAttribute("aria-label", axis.name);
      input.addEventListener("input", () => set(i, Number(input.value)));
      return { input, value };
    });

    // ---- the numbers
    const line = html(root, "div", "min-height:1.4em;margin-top:8px;font-weight:bold");
    line.className = "told";
    line.setAttribute("role", "status");
    const table = html(root, "div", "display:grid;grid-template-columns:repeat(auto-fit,minmax(250px,1fr));gap:2px 20px;margin-top:2px");
    const cell = (name, color) => {
      const row = html(table, "div", "display:flex;gap:6px;align-items:baseline");
      html(row, "span", `width:.8em;height:.8em;flex:none;border-radius:2px;background:${color ?? "none"}`);
      html(row, "span", "flex:1", name);
      return html(row, "span", "font-variant-numeric:tabular-nums");
    };
    const sizes = stack.parts.map((part, i) => cell(part, stack.colors[i]));
    const total = cell(`${stack.name}, together`);
    const others = scalars.map(([name]) => cell(name));
    const note = html(root, "div", `min-height:1.4em;margin-top:4px;color:${QUIET}`);
    note.className = "note";

    function set(axis, place) {
      places[axis] = place;
      show();
    }

    function show() {
      axes.forEach((axis, i) => {
        const text = axis.unit ? `${axis.values[places[i]]} ${axis.unit}` : `${axis.values[places[i]]}`;
        inputs[i].input.value = places[i];
        inputs[i].input.setAttribute("aria-valuetext", text);
        inputs[i].value.textContent = text;
      });
      columns.forEach(({ marked, bars, label, name }, place) => {
        const there = point(at(places.map((own, i) => (i === data.over ? place : own))));
        const chosen = place === places[data.over];
        let below = 0;
        bars.forEach((bar, i) => {
          const above = below + there.parts[i];
          bar.setAttribute("y", y(above));
          bar.setAttribute("height", Math.max(y(below) - y(above), 0));
          below = above;
        });
        const high = there.total > stack.upto;
        label.textContent = there.missing ? "none" : `${high ? "▲ " : ""}${number(there.total)}`;
        label.setAttribute("y", y(there.total) - 5);
        label.setAttribute("font-weight", chosen ? "bold" : "normal");
        name.setAttribute("font-weight", chosen ? "bold" : "normal");
        marked.setAttribute("fill", chosen ? "#00000012" : "transparent");
      });
      const now = point(at(places));
      const against = stack.limit === null ? "" : ` of ${number(stack.limit)} ${stack.unit}`;
      line.textContent = now.missing
        ? "no result"
        : [`${number(now.total)} ${stack.unit}${against}`, ...scalars.map(([name, unit], i) => `${name}: ${number(now.scalars[i])} ${unit}`)].join(" · ");
      const put = (node, value, unit) => { node.textContent = now.missing ? "–" : `${number(value)} ${unit}`; };
      sizes.forEach((node, i) => put(node, now.parts[i], stack.unit));
      put(total, now.total, stack.unit);
      others.forEach((node, i) => put(node, now.scalars[i], scalars[i][1]));
      note.textContent = now.note;
      svg.setAttribute("aria-label", `${data.title}. ${line.textContent}`);
    }
    show();
    root.dataset.ready = "yes";
  }

  for (const root of document.querySelectorAll(`[data-sliders="${data.id}"]:not([data-ready])`)) build(root);
})
