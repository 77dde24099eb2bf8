"use strict";
(() => {
  // Geometry of chart_svg.py
  const LEFT = 46, TOP = 8, WIDTH = 404, HEIGHT = 194, FINE = 100, BASE = 220;
  const AXES = JSON.parse(document.body.dataset.axes);
  const choice = { x: "step", y: "auto" };
  const make = (name, attributes = {}, text = "") => {
    const svg = ["path", "text", "circle"].includes(name);
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    element.textContent = text;
    return element;
  };
  const pair = (text) => text.split(" ").map(Number);

  function numberText(value, digits = 4) {
    if (!Number.isFinite(value)) return String(value);
    const size = Math.abs(value);
    for (const [scale, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
      if (size >= scale) return Number((value / (unit === "k" ? 1e3 : scale)).toPrecision(digits)) + unit;
    }
    if (size && size < 1e-3) return Number(value.toPrecision(digits)).toExponential().replace("e+", "e");
    return size < 1000 ? String(Number(value.toPrecision(digits))) : Math.round(value).toLocaleString("en");
  }
  function timeText(seconds, reach) {
    const [scale, unit] = reach >= 7200 ? [3600, " h"] : reach >= 120 ? [60, " min"] : [1, " s"];
    return Number((seconds / scale).toPrecision(4)) + unit;
  }
  const roundStep = (step) => {
    const power = 10 ** Math.floor(Math.log10(step));
    return power * [[1, 1.5], [2, 3.5], [5, 7.5], [10, 10.1]].find(([, most]) => step <= most * power)[0];
  };
  function ticks(low, high, count, log) {
    if (log) {
      for (const factors of [[1], [1, 3], [1, 2, 5]]) {
        const found = [];
        for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
          for (const factor of factors) if (factor * 10 ** power >= low && factor * 10 ** power <= high) found.push(factor * 10 ** power);
        const every = Math.ceil(found.length / (count + 2));
        if (found.length >= 3) return found.filter((_, number) => number % every === 0);
      }
    }
    const step = roundStep((high - low) / count), found = [];
    for (let at = Math.ceil(low / step - 1e-9); at <= Math.floor(high / step + 1e-9); at++) found.push(Number((at * step).toPrecision(12)));
    return found;
  }
  function timeTicks(low, high) {
    const scale = high >= 7200 ? 3600 : high >= 120 ? 60 : 1;
    return ticks(low / scale, high / scale, 4, false).map((tick) => tick * scale);
  }
  /** Place of a step of a run on the chosen axis. */
  function along(run, step) {
    const axis = AXES[run], to = { tokens: axis.tokens, time: axis.seconds }[choice.x], at = axis.step;
    if (!to || at.length < 2) return step;
    let low = 0, high = at.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (at[middle] <= step) low = middle; else high = middle; }
    return to[low] + ((step - at[low]) / (at[high] - at[low])) * (to[high] - to[low]);
  }

  class Chart {
    constructor(svg) {
      this.svg = svg;
      this.x = pair(svg.dataset.x);
      this.y = pair(svg.dataset.y);
      this.log = svg.dataset.log === "1";
      this.axes = svg.querySelector(".axes");
      this.inner = svg.querySelector("svg");
      this.paths = [...svg.querySelectorAll(".band, .points, .line, .dots")].map((path) => this.read(path));
      this.marks = [...svg.querySelectorAll(".mark")];
      this.cross = make("path", { class: "cross", visibility: "hidden" });
      this.dots = make("path", { class: "dots", visibility: "hidden" });
      svg.append(this.cross);
      this.view = { x: this.x, y: this.y, log: this.log };
      svg.addEventListener("pointermove", (event) => this.point(event));
      svg.addEventListener("pointerdown", (event) => this.point(event));
      svg.addEventListener("pointerleave", () => this.leave());
    }
    /** The values of a path. Coordinates are relative in lines, absolute where each point begins a path of its own. */
    read(path) {
      const text = path.getAttribute("d"), numbers = (text.match(/-?\d+/g) || []).map(Number);
      const isDots = path.classList.contains("dots"), points = [];
      let x = 0, y = 0;
      for (let at = 0; at + 1 < numbers.length; at += isDots ? 3 : 2) {
        x = isDots ? numbers[at] : x + numbers[at];
        y = isDots ? numbers[at + 1] : y + numbers[at + 1];
        points.push([this.valueX(x / FINE / WIDTH), this.valueY(1 - y / FINE / HEIGHT)]);
      }
      return { path, points, isDots, run: Number(path.dataset.run), kind: path.classList[0] };
    }
    valueX(share) { return this.x[0] + share * (this.x[1] - this.x[0]); }
    valueY(share) {
      const [low, high] = this.y;
      return this.log ? low * (high / low) ** share : low + share * (high - low);
    }
    place(run, step) { return this.svg.dataset.kind === "step" ? along(run, step) : step; }
    across(value) { const [low, high] = this.view.x; return (value - low) / (high - low || 1); }
    up(value) {
      const { y: [low, high], log } = this.view;
      return log ? Math.log(Math.max(value, 1e-300) / low) / Math.log(high / low) : (value - low) / (high - low || 1);
    }
    draw() {
      const places = this.paths.flatMap(({ run, points }) => points.map(([step]) => this.place(run, step)));
      places.push(...this.marks.map((mark) => this.place(Number(mark.dataset.run), Number(mark.dataset.at))));
      const log = choice.y === "auto" ? this.log : choice.y === "log";
      let [low, high] = this.y;
      if (log && low <= 0) {
        low = Infinity;
        for (const { points } of this.paths) for (const [, value] of points) if (value > 0 && value < low) low = value;
      }
      const canLog = log && Number.isFinite(low) && low < high;
      const [left, right] = places.reduce(([a, b], place) => [Math.min(a, place), Math.max(b, place)], [Infinity, -Infinity]);
      this.view = {
        x: [left > 0 && left < 0.2 * right ? 0 : left, right],
        y: canLog ? [low, high] : this.y, log: canLog,
      };
      for (const { path, points, isDots, run, kind } of this.paths) {
        const ends = points.map(([step, value]) => {
          const y = Math.max(-1e6, Math.min(1e6, FINE * HEIGHT * (1 - this.up(value))));
          return `${Math.round(FINE * WIDTH * this.across(this.place(run, step)))} ${Math.round(y)}`;
        });
        const line = isDots ? ends.map((end) => `M${end}h0`).join("") : "M" + ends.join("L");
        path.setAttribute("d", line + (kind === "band" ? "z" : points.length === 1 && !isDots ? "h0" : ""));
      }
      for (const mark of this.marks) {
        const place = this.place(Number(mark.dataset.run), Number(mark.dataset.at));
        mark.setAttribute("x", (LEFT + WIDTH * this.across(place)).toFixed(1));
      }
      this.drawAxes();
    }
    drawAxes() {
      const { x, y, log } = this.view, parts = [];
      for (const tick of ticks(y[0], y[1], 5, log)) {
        const at = TOP + HEIGHT * (1 - this.up(tick));
        parts.push(make("path", { class: "grid", d: `M${LEFT} ${at.toFixed(1)}h${WIDTH}` }));
        parts.push(make("text", { class: "y", x: LEFT - 6, y: (at + 3.6).toFixed(1) }, numberText(tick)));
      }
      const isTime = choice.x === "time" && this.svg.dataset.kind === "step";
      for (const tick of isTime ? timeTicks(x[0], x[1]) : ticks(x[0], x[1], 5, false)) {
        const text = isTime ? timeText(tick, x[1]) : numberText(tick);
        parts.push(make("text", { class: "x", x: (LEFT + WIDTH * this.across(tick)).toFixed(1), y: BASE }, text));
      }
      this.axes.replaceChildren(...parts);
    }
    point(event) {
      const box = this.svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * (LEFT + WIDTH + 10) - LEFT;
      const wanted = this.view.x[0] + (at / WIDTH) * (this.view.x[1] - this.view.x[0]);
      const nearest = ({ run, points }) => points.reduce((best, point) =>
        Math.abs(this.place(run, point[0]) - wanted) < Math.abs(this.place(run, best[0]) - wanted) ? point : best, points[0]);
      const lines = this.paths.filter(({ kind }) => kind === "line");
      if (!lines.length) return;
      const rows = lines.map((line) => {
        const [step, value] = nearest(line);
        const single = this.paths.find(({ kind, run }) => kind === "points" && run === line.run);
        const band = this.paths.find(({ kind, run }) => kind === "band" && run === line.run);
        let note = single ? numberText(nearest(single)[1]) : "";
        if (band) {
          const column = line.points.findIndex((point) => point[0] === step), count = band.points.length;
          note = `${numberText(band.points[count - 1 - column][1])} to ${numberText(band.points[column][1])}`;
        }
        return { run: line.run, step, value, note, place: this.place(line.run, step) };
      });
      const closest = rows.reduce((best, row) => Math.abs(row.place - wanted) < Math.abs(best.place - wanted) ? row : best);
      // A run that ended long before has nothing to say here
      const reach = (this.view.x[1] - this.view.x[0]) / 40;
      const shown = rows.filter((row) => Math.abs(row.place - closest.place) <= reach);
      this.cross.setAttribute("d", `M${(LEFT + WIDTH * this.across(closest.place)).toFixed(1)} ${TOP}v${HEIGHT}`);
      this.cross.setAttribute("visibility", "visible");
      const isStep = this.svg.dataset.kind === "step";
      const tail = { tokens: `, ${numberText(closest.place)} tokens`, time: `, ${timeText(closest.place, this.view.x[1])}` }[choice.x];
      const title = make("small", {}, isStep ? `step ${Math.round(closest.step).toLocaleString("en")}${tail || ""}` : numberText(closest.step));
      tip.show(event, [title, ...shown.map((row) => this.row(row))]);
    }
    row({ run, value, note }) {
      const line = make("div"), name = make("span", { class: `run ${AXES[run].look}` }), text = make("span", {}, numberText(value));
      name.append(make("i"), AXES[run].name);
      if (note) text.append(make("small", {}, ` (${note})`));
      line.append(name, text);
      return line;
    }
    leave() { this.cross.setAttribute("visibility", "hidden"); tip.hide(); }
  }

  const tip = {
    box: make("div", { id: "tip", hidden: "" }),
    show(event, parts) {
      this.box.replaceChildren(...parts);
      this.box.hidden = false;
      const { width, height } = this.box.getBoundingClientRect();
      const right = event.clientX + 14 + width < innerWidth;
      this.box.style.left = `${Math.max(4, right ? event.clientX + 14 : event.clientX - 14 - width)}px`;
      this.box.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 4))}px`;
    },
    hide() { this.box.hidden = true; },
  };
  document.body.append(tip.box);

  /** Values of a heat map, read from its picture: colour and opacity of a cell. */
  function readable(image) {
    const { middle, reach, rows, row, column } = image.dataset, canvas = make("canvas");
    const width = (canvas.width = image.naturalWidth), height = (canvas.height = image.naturalHeight);
    const pen = canvas.getContext("2d", { willReadFrequently: true });
    pen.drawImage(image, 0, 0);
    const names = rows.split("\n");
    const value = (across, down) => {
      const [red, , blue, alpha] = pen.getImageData(across, down, 1, 1).data;
      return Number(middle) + ((red > blue ? 1 : -1) * alpha * Number(reach)) / 255;
    };
    image.addEventListener("pointermove", (event) => {
      const box = image.getBoundingClientRect();
      const across = Math.min(width - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * width)));
      const down = Math.min(height - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * height)));
      const shown = value(across, down), end = Math.abs(shown - Number(middle)) >= Number(reach) ? " or beyond" : "";
      tip.show(event, [make("small", {}, `${row} ${names[down]}, ${column} ${across}`), make("div", {}, numberText(shown, 3) + end)]);
    });
    image.addEventListener("pointerleave", () => tip.hide());
  }

  const charts = [...document.querySelectorAll("svg.chart")].map((svg) => new Chart(svg));
  function select(label, key, options) {
    const box = make("label", {}, `${label} `), list = make("select", { id: `choose-${key}` });
    for (const [value, text] of options) list.append(make("option", { value }, text));
    list.addEventListener("change", () => { choice[key] = list.value; charts.forEach((chart) => chart.draw()); });
    box.append(list);
    return box;
  }
  if (charts.length) {
    const controls = make("div", { class: "controls" });
    const known = AXES.every((axis) => axis.step.length > 1);
    if (known) controls.append(select("over", "x", [["step", "steps"], ["tokens", "tokens"], ["time", "time in steps"]]));
    controls.append(select("values", "y", [["auto", "as they come"], ["linear", "linear"], ["log", "logarithmic"]]));
    document.querySelector(".bar-top").append(controls);
  }
  document.querySelectorAll(".map img").forEach((image) => (image.complete ? readable(image) : image.addEventListener("load", () => readable(image))));
  document.body.dataset.charts = String(charts.length);
})();
