// A trajectory: who said what, turn by turn, with rewards and seconds, and the tokens as they were
// drawn and given. All of it was written by models, data and environments: it is shown as text.

/** What a sample's `dialogue` holds; null if it has none, or it is none. */
function dialogueOf(text) {
  if (!text) return null;
  try {
    const found = JSON.parse(text);
    return found && Array.isArray(found.turns) && Array.isArray(found.tokens) ? found : null;
  } catch { return null; }
}

function dialogueParts(dialogue, wanted) {
  const said = [], aside = (told) => h("p", { class: "small muted" }, told);
  const leftOut = (count_, what) => aside(`… ${count(count_)} ${what} left out here …`);
  for (const message of Array.isArray(dialogue.begin) ? dialogue.begin : []) said.push(typeof message === "number" ? leftOut(message, "messages") : messageOf(message, [], wanted));
  let turn = 0;
  for (const one of dialogue.turns) {
    if (typeof one === "number") { turn += one; said.push(leftOut(one, "turns")); continue; }
    if (one === null || typeof one !== "object") continue;
    turn++;
    const told = [`turn ${turn}`, typeof one.policy_s === "number" ? `drawn in ${seconds(one.policy_s)}` : null];
    said.push(messageOf(one.message, told, wanted, true));
    const answers = Array.isArray(one.answers) ? one.answers : [];
    const brought = [typeof one.environment_s === "number" ? `answered in ${seconds(one.environment_s)}` : null, typeof one.reward === "number" ? `reward ${number(one.reward)}` : null].filter(Boolean);
    answers.forEach((answer, place) => said.push(messageOf(answer, place ? [] : brought, wanted)));
    if (!answers.length && brought.length) said.push(h("div", { class: "said" }, h("div", { class: "by" }, h("b", {}, "environment"), brought.map((part) => h("span", {}, part)))));
  }
  let drawn = 0, given = 0;
  const stretches = dialogue.tokens.map((one) => {
    if (typeof one === "number") return h("span", { class: "muted" }, ` … ${count(one)} stretches left out … `);
    if (!Array.isArray(one)) return null;
    if (one[0]) drawn += Number(one[1]); else given += Number(one[1]);
    return h("span", { class: one[0] ? "drawn" : "given" }, shown(String(one[2]), wanted));
  });
  const whole = dialogue.tokens.every((one) => typeof one !== "number");
  return [h("h4", {}, "Dialogue"), ...said.filter(Boolean),
    h("details", {}, h("summary", {}, `Tokens behind the prompt: ${whole ? "" : "of what is shown, "}${count(drawn)} drawn (marked, trained on), ${count(given)} given`), h("pre", { class: "tokens" }, stretches))];
}

function messageOf(message, told, wanted, isDrawn) {
  if (message === null || typeof message !== "object") return null;
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));
  const role = text(message.role || "?") + (message.name ? ` ${text(message.name)}` : ""), parts = [];
  const part = (label, value) => parts.push(label ? h("div", { class: "small muted" }, label) : null, h("pre", {}, shown(text(value), wanted)));
  if (message.reasoning_content) part("thought", message.reasoning_content);
  if (message.content) part(null, message.content);
  for (const call of Array.isArray(message.tool_calls) ? message.tool_calls : message.tool_calls ? [message.tool_calls] : []) {
    const asked = (call && call.function) || call;
    part(asked && asked.name ? `calls ${text(asked.name)}` : "calls", asked && asked.arguments !== undefined ? asked.arguments : asked);
  }
  for (const call of Array.isArray(message.malformed_tool_calls) ? message.malformed_tool_calls : []) part("a call that could not be read", call);
  if (!parts.length) parts.push(h("p", { class: "small muted", style: { margin: "0" } }, "(empty)"));
  return h("div", { class: "said" + (isDrawn ? " drawn" : "") }, h("div", { class: "by" }, h("b", {}, role), told.filter(Boolean).map((one) => h("span", {}, one))), parts);
}
