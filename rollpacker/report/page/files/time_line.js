// What the run did when: rounds with every sample as a bar, phases below, and the whole run as a
// strip. It can be moved and zoomed by mouse, touch, buttons and keys.

class TimeLine {
  constructor(data) {
    this.data = data;
    this.height = 340; this.band = 26; this.head = 20;
    const num = data.step.length;
    this.whole = num ? [data.start[0], data.end[num - 1]] : [0, 1];
    [this.from, this.to] = this.opening();
    this.canvas = h("canvas", { class: "lane", tabindex: 0, role: "img", "aria-label": "Timeline. Arrow keys move, plus and minus zoom, N and P go to the next and the previous step." });
    this.strip = h("canvas", { class: "strip", "aria-hidden": "true" });
    this.step = h("input", { type: "number", min: num ? data.step[0] : 0, max: num ? data.step[num - 1] : 0, "aria-label": "Go to step", placeholder: "step", style: { width: "90px" }, change: () => this.go(Number(this.step.value)) });
    const button = (text, label, act) => h("button", { type: "button", "aria-label": label, click: act }, text);
    this.told = h("span", { "aria-live": "polite" });
    this.element = h("div", { class: "card" },
      h("div", { class: "tools", style: { "margin-top": "0" } },
        button("−", "Zoom out", () => this.zoom(1.6)), button("+", "Zoom in", () => this.zoom(1 / 1.6)),
        button("◀", "Step before", () => this.next(-1)), button("▶", "Next step", () => this.next(1)),
        button("Whole run", "Show the whole run", () => this.show(...this.whole)),
        h("label", {}, "Go to step ", this.step), this.told),
      this.canvas, this.strip, this.legend());
    this.listen();
    for (const one of [this.canvas, this.strip]) new ResizeObserver(() => this.later()).observe(one);
    document.addEventListener("themed", () => this.later());
  }
  /** Another state of the same run: whoever looked at its end goes on looking there. */
  replace(data) {
    const atEnd = this.to >= this.whole[1] - 1e-9, span = this.to - this.from, num = data.step.length;
    this.data = data;
    this.whole = num ? [data.start[0], data.end[num - 1]] : [0, 1];
    if (atEnd) this.show(this.whole[1] - span, this.whole[1]);
    this.step.max = num ? data.step[num - 1] : 0;
    this.later();
  }
  /** A few steps that tell the rhythm: those that lead to the first long round. */
  opening() {
    const { step, start, end, rounds, kinds, bars } = this.data, num = step.length;
    if (!num) return [0, 1];
    let last = -1;
    for (let place = 0; place < num && last < 0; place++) {
      const kind = kinds[rounds.kind[rounds.first[place]]];
      if (place >= 3 && rounds.first[place + 1] > rounds.first[place] && (kind === "long" || kind === "flush") && bars.first[place + 1] > bars.first[place]) last = place;
    }
    if (last < 0) last = Math.min(num - 1, 4);
    const first = Math.max(0, last - 4);
    return [this.begin(first), end[last]];
  }
  /** A step without what came before its first round: loading and evaluations take long. */
  begin(place) {
    const { start, rounds } = this.data;
    return start[place] + (rounds.first[place + 1] > rounds.first[place] ? rounds.start[rounds.first[place]] : 0);
  }
  legend() {
    const { outcomes, names } = this.data;
    const key = (variable, text) => h("span", {}, h("i", { class: "key", style: { background: `var(${variable})` } }), text);
    return h("div", { class: "legend" }, outcomes.map((name, place) => key(OUTCOME_COLOURS[place], name)), names.map((name) => key(phaseColour(name), words(name))));
  }
  show(from, to) {
    const least = 1e-4, span = Math.min(Math.max(to - from, least), this.whole[1] - this.whole[0] || 1);
    from = Math.min(Math.max(from, this.whole[0]), this.whole[1] - span);
    this.from = from; this.to = from + span;
    this.later();
  }
  zoom(factor, at) {
    const middle = at === undefined ? (this.from + this.to) / 2 : at;
    this.show(middle - (middle - this.from) * factor, middle + (this.to - middle) * factor);
  }
  go(step) {
    const place = nearest(this.data.step, step);
    if (!this.data.step.length) return;
    const begin = this.begin(place), room = (this.data.end[place] - begin) * 0.04;
    this.show(begin - room, this.data.end[place] + room);
    this.step.value = this.data.step[place];
  }
  next(by) {
    const { end, step } = this.data, middle = (this.from + this.to) / 2;
    let place = 0;
    while (place < end.length - 1 && end[place] < middle) place++;
    this.go(step[Math.max(0, Math.min(step.length - 1, place + by))]);
  }
  later() { if (!this.frame) this.frame = requestAnimationFrame(() => { this.frame = 0; this.draw(); }); }
  visible() {
    const { start, end } = this.data;
    let first = 0, last = start.length - 1;
    for (let low = 0, high = start.length; low < high;) { const middle = (low + high) >> 1; if (end[middle] < this.from) low = middle + 1; else high = middle; first = low; }
    for (let low = 0, high = start.length; low < high;) { const middle = (low + high) >> 1; if (start[middle] <= this.to) low = middle + 1; else high = middle; last = low - 1; }
    return [first, last];
  }
  pen(canvas, height) {
    const width = canvas.clientWidth, scale = devicePixelRatio || 1;
    canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale); canvas.style.height = height + "px";
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    return [pen, width];
  }
  draw() {
    const [pen, width] = this.pen(this.canvas, this.height), { data } = this;
    if (!width) return;
    const colours = OUTCOME_COLOURS.map(css), x = this.x = (time) => ((time - this.from) / (this.to - this.from)) * width;
    const [first, last] = this.visible(), top = this.head, ground = this.height - this.band - 24;
    pen.font = "11.5px system-ui, sans-serif"; pen.textBaseline = "middle";
    pen.fillStyle = css("--sunk"); pen.fillRect(0, top, width, ground - top);
    let most = 1;
    for (let place = first; place <= last; place++) most = Math.max(most, data.bars.first[place + 1] - data.bars.first[place]);
    this.lane = (ground - top) / most;
    let labelEnd = -9, without = 0;
    for (let place = first; place <= last; place++) {
      const start = data.start[place], from = data.bars.first[place], to = data.bars.first[place + 1];
      if (from === to) without += this.drawRounds(pen, place, x, top, ground);
      const gap = this.lane > 3 ? 0.7 : 0;
      for (let bar = from; bar < to; bar++) {
        const left = x(start + data.bars.start[bar]), right = x(start + data.bars.end[bar]);
        if (right < 0 || left > width) continue;
        pen.fillStyle = colours[data.bars.outcome[bar]];
        pen.fillRect(left, ground - (bar - from + 1) * this.lane + gap / 2, Math.max(0.6, right - left), Math.max(0.5, this.lane - gap));
      }
      labelEnd = this.drawHead(pen, place, x, labelEnd);
    }
    this.drawPhases(pen, first, last, x, ground);
    this.drawAxis(pen, width);
    const num = last - first + 1;
    this.told.textContent = !data.step.length ? "" : num > 1 ? `steps ${count(data.step[first])} to ${count(data.step[last])}, ${seconds(this.to - this.from)}${without ? `; samples of ${count(num - without)} of them` : ""}` : `step ${count(data.step[first])}, ${seconds(this.to - this.from)}${without ? "; its samples are not in this page" : ""}`;
    this.drawStrip();
  }
  /** A step whose samples the page does not hold. */
  drawRounds(pen, place, x, top, ground) {
    const { data } = this, { rounds } = data;
    pen.globalAlpha = 0.35;
    for (let one = rounds.first[place]; one < rounds.first[place + 1]; one++) {
      const left = x(data.start[place] + rounds.start[one]), right = x(data.start[place] + rounds.end[one]);
      pen.fillStyle = css(data.kinds[rounds.kind[one]] === "long" ? "--deferred" : "--trained");
      pen.fillRect(left, top, Math.max(0.5, right - left - 0.5), ground - top);
    }
    pen.globalAlpha = 1;
    return 1;
  }
  drawHead(pen, place, x, labelEnd) {
    const { data } = this, left = Math.max(2, x(this.begin(place))), right = x(data.end[place]);
    const kind = data.kinds[data.rounds.kind[data.rounds.first[place]]] || "";
    const text = `${data.step[place]}  ${kind}`, wide = pen.measureText(text).width;
    const line = Math.round(x(this.begin(place))) + 0.5;
    if (right - left > 14) { pen.strokeStyle = css("--line"); pen.beginPath(); pen.moveTo(line, 2); pen.lineTo(line, this.height - this.band - 24); pen.stroke(); }
    if (left + 4 < labelEnd || right - left < wide + 8) return labelEnd;
    pen.fillStyle = css(kind === "long" || kind === "flush" ? "--deferred" : "--soft"); pen.textAlign = "left";
    pen.fillText(text, left + 4, 10);
    return left + 4 + wide;
  }
  drawPhases(pen, first, last, x, ground) {
    const { data } = this, { phases, rounds, names } = data, colours = names.map((name) => css(phaseColour(name))), faint = css("--line");
    for (let place = first; place <= last; place++) {
      const start = data.start[place];
      pen.fillStyle = faint;
      for (let one = rounds.first[place]; one < rounds.first[place + 1]; one++) pen.fillRect(x(start + rounds.start[one]), ground + 4, Math.max(0.4, x(start + rounds.end[one]) - x(start + rounds.start[one])), this.band - 8);
      for (let one = phases.first[place]; one < phases.first[place + 1]; one++) {
        const left = x(start + phases.start[one]), right = x(start + phases.end[one]);
        pen.fillStyle = colours[phases.name[one]];
        pen.fillRect(left, ground + 4, Math.max(0.4, right - left), this.band - 8);
      }
    }
  }
  drawAxis(pen, width) {
    pen.fillStyle = css("--faint"); pen.textBaseline = "top";
    const ticks = niceTicks(this.from, this.to, Math.max(2, Math.floor(width / 120))), step = ticks.length > 1 ? ticks[1] - ticks[0] : 1;
    for (const tick of ticks) {
      const at = this.x(tick);
      pen.textAlign = at < 24 ? "left" : at > width - 30 ? "right" : "center";
      pen.fillText(moment(tick, step), at, this.height - 18);
    }
  }
  drawStrip() {
    const [pen, width] = this.pen(this.strip, 30), { data } = this, [from, to] = this.whole, x = (time) => ((time - from) / (to - from || 1)) * width;
    pen.fillStyle = css("--sunk"); pen.fillRect(0, 0, width, 30);
    const colours = { long: css("--deferred"), flush: css("--deferred"), short: css("--trained"), plain: css("--trained"), cascade: css("--reward_wait") };
    let drawn = -1;
    for (let place = 0; place < data.step.length; place++) for (let one = data.rounds.first[place]; one < data.rounds.first[place + 1]; one++) {
      const left = x(data.start[place] + data.rounds.start[one]), right = x(data.start[place] + data.rounds.end[one]);
      if (right < drawn + 0.35 && data.step.length > 2000) continue;
      pen.fillStyle = colours[data.kinds[data.rounds.kind[one]]] || css("--faint");
      pen.fillRect(left, 6, Math.max(0.5, right - left), 18); drawn = right;
    }
    pen.strokeStyle = css("--ink"); pen.lineWidth = 1.5; pen.fillStyle = css("--ink"); pen.globalAlpha = 0.12;
    const left = x(this.from), right = Math.max(left + 4, x(this.to));
    pen.fillRect(left, 1, right - left, 28); pen.globalAlpha = 1; pen.strokeRect(left, 1, right - left, 28);
  }
  /** The sample, round or phase at a place of the canvas. */
  under(px, py) {
    const { data } = this, width = this.canvas.clientWidth, time = this.from + (px / width) * (this.to - this.from);
    const [first, last] = this.visible(), ground = this.height - this.band - 24;
    for (let place = first; place <= last; place++) {
      const start = data.start[place];
      if (time < start || time > data.end[place]) continue;
      const row = Math.floor((ground - py) / this.lane), bar = data.bars.first[place] + row;
      if (py < ground && py > this.head && bar < data.bars.first[place + 1] && time >= start + data.bars.start[bar] && time <= start + data.bars.end[bar]) {
        return { step: data.step[place], bar };
      }
      if (py >= ground) for (let one = data.phases.first[place]; one < data.phases.first[place + 1]; one++) if (time >= start + data.phases.start[one] && time <= start + data.phases.end[one]) return { step: data.step[place], phase: one };
      return { step: data.step[place] };
    }
    return null;
  }
  hover(event) {
    const box = this.canvas.getBoundingClientRect(), found = this.under(event.clientX - box.left, event.clientY - box.top), { data } = this;
    if (!found) { tip.hide(); return; }
    const rows = [h("div", {}, `step ${count(found.step)}`)];
    if (found.bar !== undefined) rows.unshift(h("div", {}, h("b", {}, data.bars.id.at(found.bar))), h("div", {}, `${count(data.bars.tokens[found.bar])} tokens in ${seconds(data.bars.end[found.bar] - data.bars.start[found.bar])} · ${data.outcomes[data.bars.outcome[found.bar]]}`));
    if (found.phase !== undefined) rows.unshift(h("div", {}, h("b", {}, words(data.names[data.phases.name[found.phase]])), " " + seconds(data.phases.end[found.phase] - data.phases.start[found.phase])));
    tip.show(event.clientX, event.clientY, rows);
  }
  listen() {
    const canvas = this.canvas, strip = this.strip;
    let held = null;
    canvas.addEventListener("pointerdown", (event) => { held = { x: event.clientX, from: this.from, to: this.to }; canvas.setPointerCapture(event.pointerId); tip.hide(); });
    canvas.addEventListener("pointermove", (event) => {
      if (!held) { this.hover(event); return; }
      const by = ((held.x - event.clientX) / canvas.clientWidth) * (held.to - held.from);
      this.show(held.from + by, held.to + by);
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => {
      if (held && Math.abs(event.clientX - held.x) < 3 && end === "pointerup") {
        const box = canvas.getBoundingClientRect(), found = this.under(event.clientX - box.left, event.clientY - box.top);
        if (found && found.bar !== undefined) document.dispatchEvent(new CustomEvent("sample", { detail: this.data.bars.id.at(found.bar) }));
      }
      held = null;
    });
    canvas.addEventListener("pointerleave", () => tip.hide());
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.from + ((event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth) * (this.to - this.from)));
    canvas.addEventListener("wheel", (event) => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (!event.ctrlKey && !event.metaKey && !sideways) return; // the page scrolls
      event.preventDefault();
      const span = this.to - this.from, at = this.from + ((event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth) * span;
      if (sideways) this.show(this.from + (event.deltaX / canvas.clientWidth) * span, this.to + (event.deltaX / canvas.clientWidth) * span);
      else this.zoom(Math.exp(event.deltaY * 0.004), at);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const span = this.to - this.from;
      const acts = { ArrowLeft: () => this.show(this.from - span / 5, this.to - span / 5), ArrowRight: () => this.show(this.from + span / 5, this.to + span / 5), "+": () => this.zoom(1 / 1.5), "=": () => this.zoom(1 / 1.5), "-": () => this.zoom(1.5), 0: () => this.show(...this.whole), n: () => this.next(1), p: () => this.next(-1), Home: () => this.go(this.data.step[0]), End: () => this.go(this.data.step[this.data.step.length - 1]) };
      if (acts[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); acts[event.key](); }
    });
    const move = (event) => {
      const [from, to] = this.whole, at = from + ((event.clientX - strip.getBoundingClientRect().left) / strip.clientWidth) * (to - from), half = (this.to - this.from) / 2;
      this.show(at - half, at + half);
    };
    strip.addEventListener("pointerdown", (event) => { strip.setPointerCapture(event.pointerId); move(event); });
    strip.addEventListener("pointermove", (event) => { if (event.buttons) move(event); });
  }
}

/** A time of the run with as many digits as tell it from the next tick, `step` seconds later. */
function moment(time, step) {
  let digits = 0;
  const isWhole = (units) => Math.round(units) > 0 && Math.abs(units - Math.round(units)) < 1e-3;
  while (digits < 6 && !isWhole(step * 10 ** digits)) digits++;
  const units = Math.round(time * 10 ** digits) / 10 ** digits, whole = Math.floor(units / 60);
  if (!whole) return `${units.toFixed(digits)} s`;
  const two = (text) => text.padStart(digits ? digits + 3 : 2, "0"), rest = two((units - 60 * whole).toFixed(digits));
  return whole < 60 ? `${whole}:${rest}` : `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}:${rest}`;
}

const OUTCOME_COLOURS = ["--trained", "--surplus", "--deferred", "--unused", "--failed"];
const PHASES = ["environment", "reward_wait", "training", "sync", "checkpoint", "recovery", "evaluation", "callbacks", "startup", "controller", "pool_wait", "switch"];
const phaseColour = (name) => (PHASES.includes(name) ? "--" + name : "--faint");
