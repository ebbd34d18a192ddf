"use strict";
// Reads what report/page/packing.py wrote. Nothing here touches the network.

class Texts {
  constructor(ends, bytes) { this.ends = ends; this.bytes = bytes; this.length = ends.length - 1; this.made = new Map(); }
  at(place) {
    if (place < 0 || place >= this.length) return null;
    let text = this.made.get(place);
    if (text === undefined) {
      text = Texts.decoder.decode(this.bytes.subarray(this.ends[place], this.ends[place + 1]));
      this.made.set(place, text);
    }
    return text;
  }
}
Texts.decoder = new TextDecoder("utf-8");

const KINDS_OF_ARRAY = { u1: Uint8Array, i4: Int32Array, u4: Uint32Array, f4: Float32Array, f8: Float64Array };

function unpack(buffer) {
  const view = new DataView(buffer);
  if (view.getUint32(0, false) !== 0x5250504b) throw new Error("this is no data of a page");
  const size = view.getUint32(4, true), base = Math.ceil((8 + size) / 8) * 8;
  const array = ([kind, place, length]) => new KINDS_OF_ARRAY[kind](buffer, base + place, length);
  const text = new TextDecoder("utf-8").decode(new Uint8Array(buffer, 8, size));
  return JSON.parse(text, (_, value) => {
    if (value === null || typeof value !== "object") return value;
    if (Array.isArray(value["@"])) return array(value["@"]);
    if (Array.isArray(value["@s"])) return new Texts(array(value["@s"][0]), array(value["@s"][1]));
    return value;
  });
}

async function embedded(id) {
  const element = document.getElementById(id), text = element.textContent;
  if (!text) return null;
  element.textContent = "";
  const coded = atob(text), bytes = new Uint8Array(coded.length);
  for (let place = 0; place < coded.length; place++) bytes[place] = coded.charCodeAt(place);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return unpack(await new Response(stream).arrayBuffer());
}
