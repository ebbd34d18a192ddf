// How the episodes of a run with several turns went.

const LOST_BY = { environment: "raised, or broke the protocol", deadline: "too slow", infrastructure: "their process died", prompt: "said too long a prompt" };

function episodes(run) {
  const of = run.summary.episodes;
  if (!of) return [];
  const bar = (share) => h("span", { style: { display: "block", "min-width": "60px", height: "9px", "margin-top": "7px", "border-radius": "3px", background: "var(--environment)", width: Math.max(2, 100 * share) + "%" } });
  const counts = [["whole trajectories", count(of.trajectories)], ["turns of one, mean", number(of.mean_turns, 1)], ["most turns", count(of.most_turns)], ["seconds of the policy in one", seconds(of.mean_policy_s)], ["seconds of the environment in one", seconds(of.mean_environment_s)]];
  const ended = Object.entries(of.ended).map(([reason, num]) => [reason, count(num), percent(num / of.trajectories, 0)]);
  const sources = Object.entries(of.sources).map(([name, one]) => [name, count(one.answers), seconds(one.mean_s), seconds(one.longest_s), seconds(one.mean_waited_s), count(Object.values(one.lost).reduce((a, b) => a + b, 0))]);
  const lost = of.lost.map((one) => [LOST_BY[one.cause] || one.cause, count(one.count), h("span", {}, shown(one.first))]);
  const tools = Object.entries(of.tools || {}).map(([name, one]) => [name ? h("code", {}, name) : "(there is no such tool)", count(one.calls), count(one.failed), count(one.hung), seconds(one.mean_s), seconds(one.p99_s), seconds(one.longest_s)]);
  const longest = of.slowest.length ? of.slowest[0].seconds : 1;
  const slowest = of.slowest.map((one) => [
    h("a", { href: "#samples", click: () => document.dispatchEvent(new CustomEvent("sample", { detail: one.sample })) }, h("code", {}, one.sample)),
    one.turn ? count(one.turn) : "begin", h("span", {}, h("code", {}, one.tool || ""), one.came ? "" : " (did not come)"), bar(one.seconds / (longest || 1)), seconds(one.seconds)]);
  const card = (title, ...parts) => h("div", { class: "card" }, h("h3", {}, title), parts);
  return [
    h("div", { class: "two" }, card("Trajectories", table([[""], ["", true]], counts)), card("Ended by", table([["reason"], ["", true], ["", true]], ended))),
    h("div", { style: { display: "grid", gap: "14px", "margin-top": "14px" } },
      card("Environments, by source", table([["source"], ["answers", true], ["mean", true], ["longest", true], ["waited, mean", true], ["lost", true]], sources)),
      tools.length ? card("Tools", table([["tool"], ["calls", true], ["failed", true], ["hung", true], ["mean", true], ["p99", true], ["longest", true]], tools)) : null,
      lost.length ? card("Answers that were lost", table([["because"], ["", true], ["the first"]], lost)) : null,
      slowest.length ? card("Slowest answers", table([["sample"], ["turn", true], ["longest call"], [""], ["seconds", true]], slowest)) : null),
  ];
}
