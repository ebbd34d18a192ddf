// Everything that is shown goes through here: texts become text nodes, never markup.

const SHOWN_CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

function codeOf(character) {
  const code = character.charCodeAt(0);
  if (code === 27) return "␛";
  return code < 256 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u" + code.toString(16).padStart(4, "0");
}
/** The text with its control characters told, for attributes and canvases. */
function plain(text) { return String(text).replace(SHOWN_CONTROLS, codeOf); }

/** Nodes for a text: control characters in boxes, what was searched for marked. */
function shown(text, wanted) {
  const parts = [], all = String(text);
  let end = 0;
  const put = (piece) => {
    if (!wanted) { if (piece) parts.push(document.createTextNode(piece)); return; }
    const low = piece.toLowerCase();
    let from = 0;
    if (low.length === piece.length) {
      for (let at = low.indexOf(wanted); at >= 0 && parts.length < 2000; at = low.indexOf(wanted, from)) {
        if (at > from) parts.push(document.createTextNode(piece.slice(from, at)));
        parts.push(h("mark", {}, document.createTextNode(piece.slice(at, at + wanted.length))));
        from = at + wanted.length;
      }
    }
    if (from < piece.length) parts.push(document.createTextNode(piece.slice(from)));
  };
  for (const found of all.matchAll(SHOWN_CONTROLS)) {
    if (found[0] === "\r" && all[found.index + 1] === "\n") continue;
    put(all.slice(end, found.index));
    parts.push(h("span", { class: "ctl" }, document.createTextNode(codeOf(found[0]))));
    end = found.index + found[0].length;
  }
  put(all.slice(end));
  return parts;
}

/** An element. Children are nodes or texts; a property that is a function listens. */
function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(plain(child)));
  }
  return element;
}

function number(value, digits) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (digits !== undefined) return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en-US", { maximumFractionDigits: size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4 });
}
function percent(value, digits) { return value === null || value === undefined || Number.isNaN(value) ? "–" : number(100 * value, digits === undefined ? 1 : digits) + " %"; }
function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 1e-3) return number(value * 1e6, 0) + " µs";
  if (value < 1) return number(value * 1e3, value < 0.01 ? 2 : value < 0.1 ? 1 : 0) + " ms";
  if (value < 60) return number(value, value < 10 ? 2 : 1) + " s";
  const all = Math.round(value), hours = Math.floor(all / 3600), minutes = Math.floor((all % 3600) / 60);
  const two = (n) => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(all % 60)} h` : `${minutes}:${two(all % 60)} min`;
}
function count(value) { return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US"); }
/** "1 step", "12 steps". */
function counted(value, name) { return `${count(value)} ${name}${value === 1 ? "" : "s"}`; }
function words(name) { return String(name).replace(/_/g, " "); }

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const tip = {
  show(x, y, ...children) {
    const box = document.getElementById("tip");
    box.replaceChildren(...children.flat().filter(Boolean));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = x + 16 + width > innerWidth ? x - width - 14 : x + 16;
    box.style.left = Math.max(4, left) + "px";
    box.style.top = Math.max(4, Math.min(innerHeight - height - 4, y + 14)) + "px";
  },
  hide() { document.getElementById("tip").hidden = true; },
};

function table(heads, rows, foot) {
  const cells = (tag, row) => h("tr", {}, row.map((cell, place) => h(tag, { class: heads[place][1] ? "n" : null }, cell)));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, cells("th", heads.map((head) => head[0]))),
    h("tbody", {}, rows.map((row) => cells("td", row)), foot ? cells("td", foot.map((cell) => h("b", {}, cell))) : null)));
}
