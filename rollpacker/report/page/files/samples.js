// The browser of samples: filters over all rows that are listed, a list that draws what is in
// sight, and one sample with its prompt, its text, its rewards and its data row.

const ROW_HEIGHT = 54;
const ORDERS = {
  "step": (data) => data.step, "reward": (data) => data.reward, "tokens": (data) => data.tokens,
  "seconds of the check": (data) => data.check_s, "advantage": (data) => data.advantage,
};

class Samples {
  constructor(data) {
    this.data = data;
    this.rows = new Uint32Array(0);
    this.selected = -1;
    this.filter = { search: "" };
    const kinds = data.round_kind.words.filter(Boolean), reasons = data.finish_reason.words.filter(Boolean);
    const on = { change: () => this.apply() };
    const choice = (label, options) => h("select", { "aria-label": label, ...on }, options.map(([value, text]) => h("option", { value }, text)));
    const amount = (label, step) => h("input", { type: "number", step, placeholder: label, "aria-label": label, input: () => this.soon() });
    this.inputs = {
      from: amount("from", 1), to: amount("to", 1), low: amount("least", "any"), high: amount("most", "any"),
      search: h("input", { type: "search", placeholder: "words in prompt, completion or row", "aria-label": "Search texts", input: () => this.soon() }),
      source: choice("Source", [["", "training and evaluation"], ["0", "training"], ["1", "evaluation"]]),
      kind: choice("Round kind", [["", "any"], ...kinds.map((kind) => [kind, kind])]),
      reason: choice("Finish reason", [["", "any"], ...reasons.map((reason) => [reason, reason])]),
      trained: choice("Trained on", [["", "any"], ["1", "trained on"], ["0", "not trained on"]]),
      verdict: choice("Verdict", [["", "any"], ["1", "with a verdict"], ["0", "without a verdict"]]),
      order: choice("Order", Object.keys(ORDERS).flatMap((name) => [[name + "+", name + ", least first"], [name + "-", name + ", most first"]])),
    };
    const field = (label, ...inputs) => h("label", {}, label, inputs.length > 1 ? h("span", { class: "pair" }, inputs) : inputs);
    const { from, to, low, high, search, source, kind, reason, trained, verdict, order } = this.inputs;
    this.told = h("p", { class: "small muted", "aria-live": "polite", style: { margin: "0 0 8px" } });
    this.inner = h("div", { class: "inner" });
    this.list = h("div", { class: "card list", role: "listbox", tabindex: 0, "aria-label": "Samples" }, this.inner);
    this.detail = h("div", { class: "card detail" }, h("p", { class: "muted" }, "No sample is chosen."));
    const wide = field("Search in the texts", search);
    wide.className = "wide";
    this.element = h("div", {},
      h("div", { class: "filters" }, wide, field("Step", from, to), field("Reward", low, high), field("Source", source), field("Round kind", kind), field("Finish reason", reason), field("Training", trained), field("Verdict", verdict), field("Order", order)),
      this.told, h("div", { class: "browser" }, this.list, this.detail));
    this.list.addEventListener("scroll", () => this.later());
    this.list.addEventListener("keydown", (event) => {
      const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
      if (by === undefined || !this.rows.length) return;
      event.preventDefault();
      const now = this.rows.indexOf(this.selected), next = Math.max(0, Math.min(this.rows.length - 1, now < 0 ? 0 : now + by));
      this.choose(this.rows[next], true);
    });
    new ResizeObserver(() => this.later()).observe(this.list);
    this.apply();
    this.warm();
  }
  /** Make the texts ready for the first search while nothing else is to be done. */
  warm() {
    let place = 0;
    const some = (idle) => {
      while (place < this.data.table.length && idle.timeRemaining() > 1) this.searchable(place++);
      if (place < this.data.table.length) requestIdleCallback(some); else this.isWarm = true;
    };
    if (window.requestIdleCallback) requestIdleCallback(some);
  }
  soon() { clearTimeout(this.timer); this.timer = setTimeout(() => this.apply(), 90); }
  /** The texts of a row, lower case, for the search; made once, on the first search. */
  searchable(text) {
    if (!this.low) this.low = new Array(this.data.table.length);
    let found = this.low[text];
    if (found === undefined) found = this.low[text] = (this.data.table.at(text) || "").toLowerCase();
    return found;
  }
  apply() {
    const began = performance.now(), { data, inputs } = this, num = data.num_listed;
    const value = (name, none) => (inputs[name].value === "" ? none : Number(inputs[name].value));
    const from = value("from", -Infinity), to = value("to", Infinity), low = value("low", null), high = value("high", null);
    const source = inputs.source.value, trained = inputs.trained.value, verdict = inputs.verdict.value;
    const kind = data.round_kind.words.indexOf(inputs.kind.value), reason = data.finish_reason.words.indexOf(inputs.reason.value);
    const anyKind = inputs.kind.value === "", anyReason = inputs.reason.value === "", search = inputs.search.value.trim().toLowerCase();
    this.filter.search = search;
    // Each text is looked at once, however many samples share it.
    const hits = search ? this.hits(search) : null;
    const kept = new Uint32Array(num);
    let size = 0;
    for (let row = 0; row < num; row++) {
      const step = data.step[row], reward = data.reward[row];
      if (step < from || step > to) continue;
      if (low !== null && !(reward >= low)) continue;
      if (high !== null && !(reward <= high)) continue;
      if (source !== "" && data.evaluation[row] !== Number(source)) continue;
      if (trained !== "" && (data.evaluation[row] || data.trained[row] !== Number(trained))) continue;
      if (verdict !== "" && Number.isFinite(reward) !== (verdict === "1")) continue;
      if (!anyKind && data.round_kind.of[row] !== kind) continue;
      if (!anyReason && data.finish_reason.of[row] !== reason) continue;
      if (hits && (data.text[row] < 0 || !hits[data.text[row]])) continue;
      kept[size++] = row;
    }
    this.rows = this.ordered(kept.slice(0, size));
    this.filterMs = performance.now() - began;
    const texts = data.num_texts < data.num ? ` Texts of ${count(data.num_texts)} are in this page (the first and last steps, the best, worst, longest and slowest to check, and others by a hash); the rest is in samples/ and evaluations/.` : "";
    const listed = data.num_listed < data.num ? ` ${count(data.num_listed)} of the run's ${count(data.num)} samples are listed.` : "";
    this.told.textContent = `${count(size)} of ${count(num)} samples.${listed}${texts}${hits && data.num_texts < data.num ? " The search knows these texts only." : ""}`;
    this.list.scrollTop = 0;
    this.inner.style.height = Math.min(this.rows.length * ROW_HEIGHT, 15e6) + "px";
    // Until the reader chooses one, the first sample is shown.
    if (!this.isChosen && this.rows.length) this.show(this.rows[0]); else this.draw();
  }
  hits(search) {
    const { data } = this, num = data.num_texts, found = new Uint8Array(num), known = new Int8Array(data.table.length);
    for (const name of ["completion", "dialogue", "rendered_prompt", "prompt", "row"]) {
      const places = data.texts[name];
      for (let one = 0; one < num; one++) {
        const place = places[one];
        if (place < 0 || found[one]) continue;
        if (known[place] === 0) known[place] = this.searchable(place).includes(search) ? 1 : -1;
        if (known[place] === 1) found[one] = 1;
      }
    }
    return found;
  }
  ordered(rows) {
    const chosen = this.inputs.order.value, name = chosen.slice(0, -1), down = chosen.endsWith("-"), of = ORDERS[name](this.data);
    if (!of || (name === "step" && !down)) return rows;
    // Rows without a value come last, either way.
    const worth = (row) => (Number.isFinite(of[row]) ? (down ? -of[row] : of[row]) : Infinity);
    const keys = Float64Array.from(rows, worth), order = Uint32Array.from(rows.keys());
    order.sort((a, b) => (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : a - b));
    return order.map((place) => rows[place]);
  }
  later() { if (!this.frame) this.frame = requestAnimationFrame(() => { this.frame = 0; this.draw(); }); }
  /** More rows than a browser's longest element: the scroll bar then stands for a share. */
  first() {
    const all = this.rows.length * ROW_HEIGHT, tall = Math.min(all, 15e6), view = this.list.clientHeight;
    return tall <= view ? 0 : Math.floor((this.list.scrollTop / (tall - view)) * Math.max(0, all - view) / ROW_HEIGHT);
  }
  draw() {
    const first = Math.max(0, this.first() - 3), num = Math.ceil(this.list.clientHeight / ROW_HEIGHT) + 6, rows = [];
    const tall = Math.min(this.rows.length * ROW_HEIGHT, 15e6), squeezed = tall < this.rows.length * ROW_HEIGHT;
    for (let place = first; place < Math.min(first + num, this.rows.length); place++) {
      const top = squeezed ? this.list.scrollTop + (place - this.first()) * ROW_HEIGHT : place * ROW_HEIGHT;
      rows.push(this.row(this.rows[place], top));
    }
    this.inner.replaceChildren(...(rows.length ? rows : [h("p", { class: "muted", style: { padding: "14px" } }, "No sample fits these filters.")]));
  }
  textOf(row, name) { const place = this.data.text[row]; return place < 0 ? null : this.data.table.at(this.data.texts[name][place]); }
  id(row) { return `${this.data.prompt_ids.at(this.data.prompt_id[row])}#${this.data.attempts.at(this.data.attempt[row])}`; }
  row(row, top) {
    const { data } = this, text = this.textOf(row, "completion"), kind = data.round_kind.words[data.round_kind.of[row]];
    const what = data.evaluation[row] ? "evaluation" : [kind, data.trained[row] === 0 ? "not trained on" : ""].filter(Boolean).join(" · ");
    const reason = data.finish_reason.words[data.finish_reason.of[row]] === "length" ? " · at the limit" : "";
    return h("div", { class: "row", role: "option", "aria-selected": row === this.selected, style: { top: top + "px" }, click: () => this.choose(row) },
      h("span", { class: "one" }, `step ${count(data.step[row])} · ${what} · ${count(data.tokens[row])} tokens${reason}`),
      h("span", { class: "reward" }, Number.isFinite(data.reward[row]) ? number(data.reward[row]) : "no verdict"),
      h("span", { class: "text" + (text === null ? " muted" : "") }, text === null ? "text not in this page" : text.slice(0, 300).replace(/\s+/g, " ") || "(empty)"));
  }
  /** Show the sample of this id, whatever the filters say. */
  find(id) {
    for (let row = 0; row < this.data.num_listed; row++) if (this.id(row) === id) { this.choose(row); return true; }
    return false;
  }
  choose(row, scroll) { this.isChosen = true; this.show(row, scroll); }
  show(row, scroll) {
    this.selected = row;
    if (scroll) {
      const place = this.rows.indexOf(row), top = place * ROW_HEIGHT;
      if (top < this.list.scrollTop) this.list.scrollTop = top;
      else if (top + ROW_HEIGHT > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top + ROW_HEIGHT - this.list.clientHeight;
    }
    this.draw();
    this.detail.replaceChildren(...this.told_of(row));
    this.detail.scrollTop = 0;
  }
  told_of(row) {
    const { data } = this, wanted = this.filter.search, chip = (name, value) => h("span", { class: "chip" }, name + " ", h("b", {}, value));
    const parts = [h("h3", {}, h("code", {}, this.id(row)))];
    const passed = data.evaluation[row] ? ["failed", "passed", "no verdict"][data.passed[row]] : null;
    const worth = (name) => (data[name] ? data[name][row] : NaN);
    parts.push(h("div", { class: "chips" }, chip("step", count(data.step[row])), chip("reward", number(worth("reward"))), chip("tokens", count(data.tokens[row])),
      chip("ended by", data.finish_reason.words[data.finish_reason.of[row]] || "–"), passed ? chip("evaluation:", passed) : chip("round", data.round_kind.words[data.round_kind.of[row]] || "–"),
      Number.isFinite(worth("advantage")) ? chip("advantage", number(worth("advantage"))) : null, Number.isFinite(worth("check_s")) ? chip("check", seconds(worth("check_s"))) : null,
      Number.isFinite(worth("loss_weight")) && worth("loss_weight") !== 1 ? chip("loss weight", number(worth("loss_weight"))) : null,
      data.trained[row] === 0 ? chip("", "not trained on") : null));
    const rewards = Object.entries(data.rewards).filter(([, of]) => Number.isFinite(of[row]));
    if (rewards.length > 1 || (rewards.length === 1 && rewards[0][1][row] !== worth("reward"))) parts.push(h("h4", {}, "Rewards, before their weights"), table([["reward", false], ["value", true]], rewards.map(([name, of]) => [name, number(of[row])])));
    const text = (name) => this.textOf(row, name);
    if (data.text[row] < 0) parts.push(h("p", { class: "muted" }, "Its text is not in this page, which keeps only as many as fit. It is in the run's samples/ or evaluations/."));
    else {
      if (text("failure")) parts.push(h("h4", {}, "Why there is no verdict"), h("pre", {}, shown(text("failure"), wanted)));
      const rendered = text("rendered_prompt");
      parts.push(h("h4", {}, rendered === null ? "Prompt" : "Prompt, as the model saw it"), h("pre", {}, shown(rendered === null ? text("prompt") || "" : rendered, wanted)));
      const dialogue = dialogueOf(text("dialogue"));
      if (dialogue) parts.push(...dialogueParts(dialogue, wanted));
      else parts.push(h("h4", {}, "Completion"), h("pre", { class: "completion" }, text("completion") === null ? h("span", { class: "muted" }, "not decoded: no reward was asked") : shown(text("completion"), wanted)));
      if (text("row")) parts.push(...this.dataRow(text("row_where"), text("row"), wanted));
    }
    const others = this.group(row);
    if (others.length > 1) parts.push(h("h4", {}, "Samples of this prompt, by reward"), h("div", { class: "group" }, others.map((one) => h("button", { type: "button", "aria-pressed": one === row, click: () => this.choose(one) }, Number.isFinite(data.reward[one]) ? number(data.reward[one]) : "–"))));
    return parts;
  }
  dataRow(where, row, wanted) {
    let columns = null;
    try { columns = JSON.parse(row); } catch { /* shown as it is */ }
    const cell = (value) => h("pre", { style: { "max-height": "200px" } }, shown(typeof value === "string" ? value : JSON.stringify(value, null, 1), wanted));
    const head = h("h4", {}, "Data row", where ? [": ", h("code", {}, where)] : null);
    if (columns === null || typeof columns !== "object" || Array.isArray(columns)) return [head, cell(columns === null ? row : columns)];
    return [head, h("table", {}, h("tbody", {}, Object.entries(columns).map(([name, value]) => h("tr", {}, h("td", { class: "muted" }, name), h("td", {}, cell(value))))))];
  }
  group(row) {
    const { data } = this, found = [];
    for (let one = 0; one < data.num_listed && found.length < 200; one++) if (data.prompt_id[one] === data.prompt_id[row] && data.step[one] === data.step[row] && data.evaluation[one] === data.evaluation[row]) found.push(one);
    const worth = (one) => (Number.isFinite(data.reward[one]) ? data.reward[one] : Infinity);
    return found.sort((a, b) => worth(a) - worth(b));
  }
}
