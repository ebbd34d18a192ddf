// Curves over steps, drawn on canvases: hand-made, since a page must hold all it needs.
// All charts of a page share the range of steps that is looked at and the step under the pointer.

const charts = {
  all: new Set(), range: null, cursor: null, smoothing: 0, wide: 0,
  draw() { for (const chart of this.all) chart.later(); },
  zoom(range) { this.range = range; document.dispatchEvent(new Event("zoomed")); this.draw(); },
};

/** Means over a window that fades out to the left; gaps stay gaps. */
function smoothed(values, share) {
  if (!share) return values;
  const found = new Float64Array(values.length);
  let sum = 0, weight = 0;
  for (let place = 0; place < values.length; place++) {
    if (Number.isFinite(values[place])) { sum = share * sum + (1 - share) * values[place]; weight = share * weight + (1 - share); found[place] = sum / weight; }
    else found[place] = NaN;
  }
  return found;
}

function niceTicks(least, most, wanted) {
  const span = most - least;
  if (!(span > 0)) return [least];
  const rough = span / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let at = Math.ceil(least / step - 1e-9) * step; at <= most + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

class Chart {
  /** lines: [{name, colour, x, mean, min?, max?, dots?, stack?}]; format: a number as text. */
  constructor({ title, what, lines, format = number, height = 190, zero = false, share = false, xName = "step", own = false }) {
    Object.assign(this, { title, lines, format, zero, share, xName, own, height });
    this.canvas = h("canvas", { tabindex: 0, role: "img", height });
    this.now = h("span", { class: "now" });
    const many = lines.length > 1;
    this.element = h("figure", { class: "card chart", style: { margin: "0" } },
      h("header", {}, h("h3", {}, title), this.now),
      what ? h("p", { class: "what" }, what) : null, this.canvas,
      many ? h("div", { class: "legend" }, lines.map((line) => h("span", {}, h("i", { class: "key", style: { background: `var(${line.colour})` } }), line.name))) : null);
    this.describe();
    this.listen();
    charts.all.add(this);
    new ResizeObserver(() => this.later()).observe(this.canvas);
    new IntersectionObserver((entries) => { this.seen = entries.some((one) => one.isIntersecting); if (this.seen && this.stale) this.later(); }, { rootMargin: "300px" }).observe(this.canvas);
  }
  describe() {
    const told = this.lines.map((line) => {
      const known = Array.from(line.mean).filter(Number.isFinite);
      if (!known.length) return `${line.name}: no value`;
      const least = known.reduce((a, b) => Math.min(a, b)), most = known.reduce((a, b) => Math.max(a, b));
      return `${line.name}: first ${this.format(known[0])}, last ${this.format(known[known.length - 1])}, least ${this.format(least)}, most ${this.format(most)}`;
    });
    this.canvas.setAttribute("aria-label", plain(`${this.title}. ${told.join(". ")}. Arrow keys read single steps.`));
    const last = this.lines[0] && Array.from(this.lines[0].mean).filter(Number.isFinite).pop();
    this.now.textContent = this.lines.length === 1 && last !== undefined ? this.format(last) : "";
  }
  replace(lines) { this.lines = lines; this.describe(); this.later(); }
  drop() { charts.all.delete(this); }
  later() {
    if (this.seen === false) { this.stale = true; return; }
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => { this.frame = 0; this.stale = false; this.draw(); });
  }
  whole() {
    let least = Infinity, most = -Infinity;
    for (const line of this.lines) if (line.x.length) { least = Math.min(least, line.x[0]); most = Math.max(most, line.x[line.x.length - 1]); }
    return least === Infinity ? [0, 1] : least === most ? [least - 0.5, most + 0.5] : [least, most];
  }
  bounds() {
    let [left, right] = this.own ? this.whole() : charts.range || this.whole();
    let least = Infinity, most = -Infinity;
    const sums = this.share ? [0] : null;
    for (const line of this.lines) {
      const { x } = line;
      for (let place = 0; place < x.length; place++) {
        if (x[place] < left || x[place] > right) continue;
        const low = line.top ? line.low[place] : line.min && !charts.smoothing ? line.min[place] : line.mean[place];
        const high = line.top ? line.top[place] : line.max && !charts.smoothing ? line.max[place] : line.mean[place];
        if (low < least) least = low;
        if (high > most) most = high;
      }
    }
    if (sums) [least, most] = [0, Math.max(most, 0)];
    if (least === Infinity) [least, most] = [0, 1];
    if (this.zero) least = Math.min(0, least);
    if (least === most) { const some = Math.abs(least) * 0.1 || 0.5; least -= this.zero && least === 0 ? 0 : some; most += some; }
    const room = (most - least) * 0.06;
    return { left, right, least: this.zero && least === 0 ? 0 : least - room, most: most + room };
  }
  draw() {
    const canvas = this.canvas, width = canvas.clientWidth, height = this.height, scale = devicePixelRatio || 1;
    if (!width) return;
    canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale); canvas.style.height = height + "px";
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const box = this.bounds(), ticks = niceTicks(box.least, box.most, 4);
    pen.font = "11.5px system-ui, sans-serif";
    const labels = ticks.map((tick) => this.format(tick));
    const edge = Math.min(90, Math.max(...labels.map((label) => pen.measureText(label).width), 10) + 10);
    const area = this.area = { left: edge, top: 8, right: width - 8, bottom: height - 20 };
    const x = this.x = (value) => area.left + ((value - box.left) / (box.right - box.left)) * (area.right - area.left);
    const y = (value) => area.bottom - ((value - box.least) / (box.most - box.least)) * (area.bottom - area.top);
    this.at = (pixel) => box.left + ((pixel - area.left) / (area.right - area.left)) * (box.right - box.left);
    const ink = css("--faint"), line = css("--line");
    pen.textBaseline = "middle"; pen.textAlign = "right"; pen.lineWidth = 1;
    ticks.forEach((tick, place) => {
      const at = Math.round(y(tick)) + 0.5;
      if (at < area.top - 2 || at > area.bottom + 2) return;
      pen.strokeStyle = line; pen.beginPath(); pen.moveTo(area.left, at); pen.lineTo(area.right, at); pen.stroke();
      pen.fillStyle = ink; pen.fillText(labels[place], area.left - 6, at);
    });
    pen.textBaseline = "top"; pen.textAlign = "center"; pen.fillStyle = ink;
    for (const tick of niceTicks(box.left, box.right, Math.max(2, Math.floor(width / 90)))) {
      if (Number.isInteger(tick) && x(tick) <= area.right + 1) pen.fillText(count(tick), Math.min(x(tick), area.right - 8), area.bottom + 5);
    }
    pen.save(); pen.beginPath(); pen.rect(area.left - 2, 0, area.right - area.left + 4, area.bottom + 1); pen.clip();
    for (const one of this.lines) one.top ? this.drawArea(pen, one, x, y) : this.drawLine(pen, one, x, y);
    pen.restore();
    if (this.drag) { pen.fillStyle = css("--accent"); pen.globalAlpha = 0.14; pen.fillRect(Math.min(...this.drag), area.top, Math.abs(this.drag[1] - this.drag[0]), area.bottom - area.top); pen.globalAlpha = 1; }
    if (charts.cursor !== null && !this.own) {
      const at = Math.round(x(charts.cursor)) + 0.5;
      if (at >= area.left && at <= area.right) { pen.strokeStyle = css("--faint"); pen.setLineDash([3, 3]); pen.beginPath(); pen.moveTo(at, area.top); pen.lineTo(at, area.bottom); pen.stroke(); pen.setLineDash([]); }
    }
  }
  drawArea(pen, line, x, y) {
    pen.fillStyle = css(line.colour);
    const num = line.x.length;
    if (!num) return;
    pen.beginPath();
    for (let place = 0; place < num; place++) pen.lineTo(x(line.x[place]), y(line.top[place]));
    for (let place = num - 1; place >= 0; place--) pen.lineTo(x(line.x[place]), y(line.low[place]));
    pen.fill();
  }
  drawLine(pen, line, x, y) {
    const colour = css(line.colour), values = smoothed(line.mean, line.dots ? 0 : charts.smoothing);
    const trace = (of) => {
      pen.beginPath();
      let open = false;
      for (let place = 0; place < of.length; place++) {
        if (!Number.isFinite(of[place])) { if (!line.gaps) continue; open = false; continue; }
        open ? pen.lineTo(x(line.x[place]), y(of[place])) : pen.moveTo(x(line.x[place]), y(of[place]));
        open = true;
      }
      pen.stroke();
    };
    pen.strokeStyle = pen.fillStyle = colour; pen.lineJoin = "round";
    if (line.min) {
      pen.globalAlpha = 0.2; pen.beginPath();
      const known = [];
      for (let place = 0; place < line.x.length; place++) if (Number.isFinite(line.max[place])) known.push(place);
      for (const place of known) pen.lineTo(x(line.x[place]), y(line.max[place]));
      for (const place of known.reverse()) pen.lineTo(x(line.x[place]), y(line.min[place]));
      pen.fill(); pen.globalAlpha = 1;
    }
    if (values !== line.mean) { pen.globalAlpha = 0.28; pen.lineWidth = 1; trace(line.mean); pen.globalAlpha = 1; }
    pen.lineWidth = 1.9; trace(values);
    if (line.dots || line.x.length < 12) for (let place = 0; place < line.x.length; place++) if (Number.isFinite(values[place])) { pen.beginPath(); pen.arc(x(line.x[place]), y(values[place]), 3.4, 0, 7); pen.fill(); }
  }
  listen() {
    const canvas = this.canvas;
    const place = (event) => event.clientX - canvas.getBoundingClientRect().left;
    canvas.addEventListener("pointermove", (event) => {
      if (!this.at) return;
      if (this.drag) { this.drag[1] = place(event); this.draw(); return; }
      this.point(this.at(place(event)), event.clientX, event.clientY);
    });
    canvas.addEventListener("pointerleave", () => { if (!this.drag) { charts.cursor = null; tip.hide(); charts.draw(); } });
    canvas.addEventListener("pointerdown", (event) => { if (event.pointerType !== "mouse" || this.own || !this.at) return; this.drag = [place(event), place(event)]; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => {
      if (!this.drag) return;
      const [from, to] = this.drag.map(this.at).sort((a, b) => a - b), far = Math.abs(this.drag[1] - this.drag[0]) > 6;
      this.drag = null;
      if (far && to - from >= 1) charts.zoom([from, to]); else this.later();
    });
    canvas.addEventListener("dblclick", () => charts.zoom(null));
    canvas.addEventListener("blur", () => { charts.cursor = null; tip.hide(); charts.draw(); });
    canvas.addEventListener("keydown", (event) => {
      const x = this.lines.length ? this.lines[0].x : [];
      if (!x.length || !this.x) return;
      if (event.key === "Escape") { charts.zoom(null); return; }
      let now = charts.cursor === null ? x.length - 1 : nearest(x, charts.cursor);
      const far = event.shiftKey ? 10 : 1;
      if (event.key === "ArrowLeft") now -= charts.cursor === null ? 0 : far;
      else if (event.key === "ArrowRight") now += far;
      else if (event.key === "Home") now = 0;
      else if (event.key === "End") now = x.length - 1;
      else return;
      event.preventDefault();
      const step = x[Math.max(0, Math.min(x.length - 1, now))], box = canvas.getBoundingClientRect();
      this.point(step, box.left + this.x(step), box.top + 20);
    });
  }
  /** Tell what each line has at a step. */
  point(step, clientX, clientY) {
    const first = this.lines.find((line) => line.x.length);
    if (!first) return;
    const exact = first.x[nearest(first.x, step)];
    charts.cursor = exact;
    const rows = [...this.lines].reverse().map((line) => {
      if (!line.x.length) return null;
      const at = nearest(line.x, exact), value = line.mean[at];
      if (!Number.isFinite(value)) return null;
      const range = line.min && Number.isFinite(line.min[at]) ? `  (${this.format(line.min[at])} to ${this.format(line.max[at])})` : "";
      const other = line.x[at] === exact ? "" : ` (${this.xName} ${count(line.x[at])})`;
      return h("tr", {}, h("td", {}, h("i", { class: "key", style: { background: `var(${line.colour})` } }), line.name), h("td", {}, h("b", {}, this.format(value)), range, other));
    });
    const of = first.of > 1 ? `${this.xName}s ${count(exact - first.of + 1)} to ${count(exact)}` : `${this.xName} ${count(exact)}`;
    tip.show(clientX, clientY, h("div", {}, of), h("table", {}, rows));
    charts.draw();
  }
}

/** The place of the value in an ascending list that is closest to `wanted`. */
function nearest(list, wanted) {
  let low = 0, high = list.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (list[middle] < wanted) low = middle + 1; else high = middle; }
  return low > 0 && Math.abs(list[low - 1] - wanted) <= Math.abs(list[low] - wanted) ? low - 1 : low;
}

/** A line of a chart from a column of metrics; null where the run has no such metric. */
function lineOf(metrics, name, { label = name, colour = "--s0", dots = false } = {}) {
  const column = metrics.columns[name];
  if (!column || !column.mean.length || !column.mean.some(Number.isFinite)) return null;
  return { name: label, colour, dots, x: metrics.step, of: metrics.of, mean: column.mean, min: column.min, max: column.max };
}

/** Lines on top of each other, each with where it begins and ends. */
function stacked(lines) {
  if (!lines.length) return [];
  let low = new Float64Array(lines[0].x.length);
  return lines.map((line) => {
    const top = low.map((value, place) => value + (Number.isFinite(line.mean[place]) ? Math.max(0, line.mean[place]) : 0));
    const one = { ...line, low, top, min: undefined, max: undefined };
    low = top;
    return one;
  });
}
