// The sections of one run: what came of it, where its seconds went, how it learned.

const share = (value) => percent(value, 1);

/** Why a run is over, and the colour of that: one that was interrupted has not done what it was to do, one that failed cannot. */
const ended = ({ finished, failed }) => failed ? ["bad", `failed: ${failed}`] : [finished === "interrupted" ? "warning" : "good", finished];
const isOver = ({ finished, failed }) => Boolean(finished || failed);

function stateOf(run) {
  const { summary } = run;
  if (isOver(summary)) return ended(summary);
  if (run.gone) return ["bad", "the run's folder is gone"];
  if (run.quiet_s !== null && run.quiet_s < 120) return ["live", `running, ${words(run.phase)}`];
  return ["warning", "not finished"];
}

function firstAndLast(rows, name) {
  const known = rows.map((row) => row[name]).filter((value) => value !== undefined && value !== null);
  return known.length ? [known[0], known[known.length - 1]] : null;
}

function tile(name, value, note, unit) {
  return h("div", { class: "card tile" }, h("div", { class: "name" }, name), h("div", { class: "value" }, value, unit ? h("small", {}, " " + unit) : null), h("div", { class: "note" }, note || "\u00a0"));
}
function change(before, after, format = number, better = 1) {
  const by = after - before;
  if (!Number.isFinite(by)) return null;
  if (by === 0) return "as at the start";
  return [`from ${format(before)}  `, h("span", { class: by * better > 0 ? "up" : by * better < 0 ? "down" : "" }, (by > 0 ? "+" : "") + format(by))];
}
function meanOf(metrics, name, last) {
  const column = metrics.columns[name];
  if (!column) return null;
  const known = Array.from(last ? column.mean.slice(-last) : column.mean).filter(Number.isFinite);
  return known.length ? known.reduce((a, b) => a + b) / known.length : null;
}

function heading(run) {
  const { summary } = run, [level, state] = stateOf(run);
  const started = run.started_at ? new Date(run.started_at) : null;
  const facts = [
    `${counted(summary.steps.total, "step")} in ${seconds(summary.wall_s)}`, summary.sessions > 1 ? `${summary.sessions} sessions` : null,
    started && !Number.isNaN(started.getTime()) ? `started ${started.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })}` : null,
  ].filter(Boolean);
  // What a live run is doing stands above, newer than this.
  const pill = kindOfPage === "live" && !isOver(summary) && !run.gone ? null : h("span", { class: "pill " + level }, state);
  return [
    h("div", { class: "head" }, h("h1", {}, run.name), pill, run.truncated ? h("span", { class: "pill warning" }, "the log's last line is cut off") : null, summary.unsandboxed ? h("span", { class: "pill bad" }, "unsandboxed") : null),
    h("p", { class: "lead" }, facts.join(" · ")),
  ];
}

function tiles(run) {
  const { summary, metrics } = run, found = [], evaluated = summary.evaluations;
  const passed = firstAndLast(evaluated, "eval/pass@1");
  if (passed) found.push(tile("Held-out pass@1", number(passed[1], 3), evaluated.length > 1 ? change(passed[0], passed[1], (v) => number(v, 3)) : "one evaluation"));
  const { first, last } = summary.training_reward;
  if (last !== null) found.push(tile("Training reward", number(last, 3), change(first, last, (v) => number(v, 3))));
  found.push(tile("A step takes", seconds(summary.steps.mean_step_s).split(" ")[0], `rollout ${seconds(summary.steps.mean_rollout_s)}`, seconds(summary.steps.mean_step_s).split(" ")[1]));
  const steps = summary.steps.mean_step_s * summary.steps.total, speed = steps ? summary.tokens.trained / steps : null;
  found.push(tile("Trained tokens", number(speed, speed >= 100 ? 0 : 1), `${count(summary.tokens.trained)} in all`, "per s"));
  const rollout = summary.seconds.decode + summary.seconds.tail_idle + (summary.seconds.imbalance || 0);
  if (rollout) found.push(tile("Slots idle in rollouts", share(summary.seconds.tail_idle / rollout), "while the longest finish"));
  found.push(tile("Waiting for rewards", share(summary.wall_s ? summary.seconds.reward_wait / summary.wall_s : null), "of the wall time"));
  if (summary.lengths.trained_mean !== null) found.push(tile("Mean length trained on, last 50 steps", number(summary.lengths.trained_mean, 1), summary.lengths.shift === null ? "tokens" : `policy's own ${number(summary.lengths.policy_mean, 1)} (${summary.lengths.shift >= 0 ? "+" : ""}${percent(summary.lengths.shift, 1)})`, "tokens"));
  return h("div", { class: "tiles" }, found);
}

function whereSecondsWent(run) {
  const { summary, causes } = run, wall = summary.wall_s || 1, spent = Object.entries(summary.seconds);
  const bar = h("div", { class: "stack", role: "img", "aria-label": "Share of the wall time by cause; the table below has the numbers." }, spent.filter(([, s]) => s / wall > 0.0005).map(([cause, s]) => h("i", {
    style: { width: (100 * s) / wall + "%", background: `var(--${cause})` },
    pointermove: (event) => tip.show(event.clientX, event.clientY, h("b", {}, words(cause)), ` ${seconds(s)}, ${share(s / wall)}`), pointerleave: tip.hide,
  })));
  const rows = spent.map(([cause, s]) => [[h("i", { class: "key", style: { background: `var(--${cause})` } }), words(cause)], h("span", { class: "muted small" }, causes[cause]), seconds(s), share(s / wall)]);
  return h("div", { class: "card" }, h("h3", {}, "Where the seconds went"), bar, table([["cause"], ["what it is"], ["time", true], ["share", true]], rows, ["all", "", seconds(summary.wall_s), "100 %"]));
}

function health(run) {
  return h("div", { class: "card" }, h("h3", {}, "Is it healthy?"), h("ul", { class: "findings" }, run.health.map((one) => h("li", { class: one.level }, h("span", {}, h("span", { class: "sr" }, one.level + ": "), one.text)))));
}

/** What is drawn in a section: [title, what it is, names of metrics, settings]. */
const LEARNING = [
  ["Reward", "mean over the samples trained on", ["critic/rewards/mean"]],
  ["pass@1", "held-out evaluation", ["eval/pass@1"], { eval: true }],
  ["Held-out reward", "mean over the evaluation's responses", ["eval/reward"], { eval: true }],
  ["Groups without signal", "share of groups whose rewards are all equal", ["critic/frac_reward_zero_std"], { format: share, zero: true }],
  ["Loss", "of each optimizer step", ["actor/loss"]],
  ["KL to the reference", "mean per token, nats", ["actor/kl"]],
  ["KL of the update", "old minus new log-probs per token, nats", ["actor/ppo_kl"]],
  ["Entropy", "mean per response token, nats", ["actor/entropy"], { zero: true }],
  ["Gradient norm", "before clipping", ["actor/grad_norm"], { zero: true }],
  ["Clipped tokens", "share whose ratio was clipped", ["actor/clip_ratio_low", "actor/clip_ratio_high"], { format: share, zero: true }],
  ["Trainer against engine", "difference of log-probs of one token, nats", ["sampling/sampling_logp_difference/mean"], { zero: true }],
  ["Learning rate", "", ["actor/lr"], { zero: true }],
];
const LENGTHS = [
  ["Trained on, and the policy's own", "mean tokens; the policy's own is estimated from all launches, aborted ones too", ["length/trained_mean", "length/policy_mean"], { zero: true, labels: ["trained on", "the policy's own"] }],
  ["Lengths trained on", "tokens", ["response_length/mean", "response_length/median", "response_length/max"], { zero: true, labels: ["mean", "median", "longest"] }],
  ["Length shift", "mean trained on, relative to the policy's own", ["length/shift"], { format: share }],
  ["At the length limit", "share of the responses trained on", ["response_length/clip_ratio"], { format: share, zero: true }],
  ["Aborted", "share of the samples launched", ["response/aborted_ratio"], { format: share, zero: true }],
  ["Waiting prompts", "in the long queue when a step ends", ["long_queue/prompts"], { zero: true }],
  ["Held-out length", "mean tokens", ["eval/response_length"], { eval: true, zero: true }],
];
const TIME = [
  ["Idle slots", "tail idle by rollout seconds", ["perf/tail_idle_ratio"], { format: share, zero: true }],
  ["Trained tokens per second", "of the step", ["perf/throughput"], { zero: true }],
  ["Generated tokens per second", "of the rollout", ["perf/gen_throughput"], { zero: true }],
  ["Waiting for rewards", "seconds a step", ["timing_s/reward"], { format: seconds, zero: true }],
  ["Model FLOPs utilization", "of the trainer's devices", ["perf/mfu/actor"], { format: share, zero: true }],
  ["Trainer's memory", "GiB, largest since the step before", ["perf/train_peak_memory_gib"], { zero: true }],
];

const isConstant = (line) => { const known = Array.from(line.mean).filter(Number.isFinite); return known.every((value) => value === 0); };

function chartsOf(run, plans) {
  return plans.map(([title, what, names, { eval: evaluated, labels, ...settings } = {}]) => {
    const lines = names.map((name, place) => lineOf(evaluated ? run.evaluations : run.metrics, name, { label: labels ? labels[place] : name, colour: `--s${place}`, dots: evaluated })).filter(Boolean);
    return lines.length && !lines.every(isConstant) ? drawn(run, { title, what, lines, ...settings }) : null;
  }).filter(Boolean);
}

/** A chart of a run; a live page keeps it and gives it other lines. */
function drawn(run, plan) {
  const kept = run.charts.get(plan.title);
  if (kept && kept.lines.length === plan.lines.length) kept.replace(plan.lines);
  else run.charts.set(plan.title, new Chart(plan));
  return run.charts.get(plan.title).element;
}

/** With several updates in a step: how far the last went from the weights that sampled. */
function clipsByUpdate(run) {
  const names = Object.keys(run.metrics.columns).filter((name) => name.startsWith("actor/clip_ratio_high/update_"));
  const numbers = names.map((name) => Number(name.split("_").pop())).sort((one, other) => one - other).slice(0, 8);
  const lines = numbers.map((number, place) => lineOf(run.metrics, `actor/clip_ratio_high/update_${number}`, { label: `update ${number}`, colour: `--s${place}` })).filter(Boolean);
  return lines.length && !lines.every(isConstant) ? [drawn(run, { title: "Clipped above, by update", what: "share of tokens whose ratio was above the clip" + (names.length > 8 ? `; the first 8 of ${names.length} updates` : ""), lines, format: share, zero: true })] : [];
}

function rewardsByName(run) {
  const names = Object.keys(run.metrics.columns).filter((name) => /^rewards\/.*\/mean$/s.test(name));
  if (names.length < 2) return [];
  const lines = names.slice(0, 8).map((name, place) => lineOf(run.metrics, name, { label: name.slice(8, -5), colour: `--s${place}` })).filter(Boolean);
  return lines.length ? [drawn(run, { title: "Each reward", what: "means before their weights" + (names.length > 8 ? `; the first 8 of ${names.length}` : ""), lines })] : [];
}

function secondsByStep(run) {
  const names = Object.entries(run.cause_metrics).filter(([cause]) => !["evaluation", "startup"].includes(cause));
  const lines = names.map(([cause, name]) => lineOf(run.metrics, name, { label: words(cause), colour: "--" + cause })).filter((line) => line && !isConstant(line));
  if (!lines.length) return null;
  const of = lines[0].of > 1 ? `; means of ${lines[0].of} steps` : "";
  return drawn(run, { title: "Seconds by cause, step by step", what: `stacked; evaluation and startup left out${of}`, lines: stacked(lines), format: seconds, share: true, height: 260 });
}

function rounds(run) {
  const rows = Object.entries(run.summary.steps.by_kind).map(([kind, of]) => [kind, count(of.steps), seconds(of.mean_step_s), seconds(of.mean_rollout_s), number(of.median_tokens, 0), count(of.longest_tokens)]);
  return h("div", { class: "card" }, h("h3", {}, "Kinds of rounds"), table([["round"], ["steps", true], ["step", true], ["rollout", true], ["median tokens", true], ["longest", true]], rows));
}

function tokens(run) {
  const { tokens: of, prompts, samples, carrying } = run.summary, silent = Object.values(samples.no_verdict).reduce((a, b) => a + b, 0);
  const rows = [["tokens generated", count(of.generated)], ["tokens trained on", count(of.trained)], ["generated per trained", number(of.generated_per_trained, 2)], ["samples launched", count(samples.launched)], ["samples trained on", count(samples.trained)], ["samples aborted", count(samples.aborted)], ["samples without a verdict", count(silent)], ["prompts trained on", count(prompts.trained)], ["prompts deferred", count(prompts.deferred)], ["prompts that wait", count(prompts.long_queue)]];
  if (carrying && carrying.tokens) rows.push(["tokens carried to a later launch", count(carrying.tokens)], ["kept of them", percent(carrying.kept_ratio)]);
  return h("div", { class: "card" }, h("h3", {}, "Tokens, samples, prompts"), table([["" ], ["", true]], rows));
}

function checks(run) {
  const kinds = Object.entries(run.summary.checks);
  if (!kinds.length) return [h("p", { class: "muted" }, "No check has ended yet.")];
  const rows = kinds.map(([name, of]) => [name, count(of.checks), seconds(of.mean_s), seconds(of.longest_s), seconds(of.mean_queue_s), of.deadline_s === null ? "–" : seconds(of.deadline_s), count(of.timed_out), count(Object.values(of.failed).reduce((a, b) => a + b, 0)), count(of.cancelled)]);
  const slowest = kinds.flatMap(([name, of]) => of.slowest.map((one) => [one.seconds, one.sample, name])).sort((a, b) => b[0] - a[0]).slice(0, 12);
  const longest = slowest.length ? slowest[0][0] : 1;
  const found = slowest.map(([time, sample, kind]) => [
    h("a", { href: "#samples", click: () => document.dispatchEvent(new CustomEvent("sample", { detail: sample })) }, h("code", {}, sample)), kind,
    h("span", { style: { display: "block", "min-width": "60px", height: "9px", "margin-top": "7px", "border-radius": "3px", background: "var(--reward_wait)", width: Math.max(2, (100 * time) / (longest || 1)) + "%" } }), seconds(time)]);
  return [
    h("div", { class: "card" }, table([["kind"], ["checks", true], ["mean", true], ["longest", true], ["queued, mean", true], ["limit", true], ["timed out", true], ["failed", true], ["cancelled", true]], rows)),
    slowest.length ? h("div", { class: "card", style: { "margin-top": "14px" } }, h("h3", {}, "Slowest checks"), table([["sample"], ["kind"], ["", false], ["seconds", true]], found)) : null,
  ];
}

function settings(run) {
  const rows = run.settings.map(([key, value, normal]) => [h("code", {}, key), h("code", {}, value), h("span", { class: "muted" }, normal === null ? "no default" : h("code", {}, normal))]);
  return [
    rows.length ? h("div", { class: "card" }, table([["key"], ["value"], ["default"]], rows)) : h("p", { class: "muted" }, "config.yaml cannot be read."),
    run.config ? h("details", {}, h("summary", {}, "config.yaml, every key"), h("pre", {}, shown(run.config))) : null,
  ];
}

/** Any metric by its name, of the run that `held` has at that time. */
function explorer(held) {
  const list = h("div", { class: "grid" }), names = [...new Set([held.run.metrics, held.run.evaluations].flatMap(({ columns }) => Object.keys(columns)))].sort();
  const most = 12, made = [];
  const told = h("span", { "aria-live": "polite" });
  const input = h("input", { type: "search", placeholder: "such as grad_norm or perf/checks", "aria-label": "Metric", list: "names", style: { width: "min(420px, 100%)" }, input: () => draw() });
  const draw = () => {
    for (const chart of made.splice(0)) chart.drop();
    const wanted = input.value.trim().toLowerCase(), found = wanted ? names.filter((name) => name.toLowerCase().includes(wanted)) : [];
    told.textContent = wanted ? `${count(found.length)} of ${count(names.length)} metrics${found.length > most ? `, the first ${most} are drawn` : ""}` : `${count(names.length)} metrics; docs/metrics.md says what they are`;
    for (const name of found.slice(0, most)) {
      const dots = !held.run.metrics.columns[name], line = lineOf(dots ? held.run.evaluations : held.run.metrics, name, { dots });
      if (line) made.push(new Chart({ title: name, lines: [line] }));
    }
    list.replaceChildren(...made.map((chart) => chart.element));
  };
  draw();
  document.addEventListener("updated", draw);
  return [h("div", { class: "tools" }, input, h("datalist", { id: "names" }, names.map((name) => h("option", { value: name }))), told), list];
}
