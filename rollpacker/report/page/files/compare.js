// Several runs beside each other: one table, and every curve once, the runs in colours.

function overlaid(runs, plans) {
  return plans.flatMap(([title, what, names, { eval: evaluated, labels, ...settings } = {}]) => names.map((name, which) => {
    const lines = coinciding(runs.map((run, place) => lineOf(evaluated ? run.evaluations : run.metrics, name, { label: run.label, colour: `--s${place % 8}`, dots: evaluated })).filter(Boolean));
    if (!lines.length || lines.every(isConstant)) return null;
    return new Chart({ title: names.length > 1 ? `${title}: ${labels ? labels[which] : name}` : title, what, lines, ...settings }).element;
  })).filter(Boolean);
}

/** A curve that lies exactly on one before it says so, and is dashed: both can be seen. */
function coinciding(lines) {
  const same = (one, other) => one.length === other.length && one.every((value, place) => Object.is(value, other[place]));
  return lines.map((line, place) => {
    const under = lines.slice(0, place).find((one) => same(one.x, line.x) && same(one.mean, line.mean));
    return under ? { ...line, name: `${line.name} (coincides with ${under.name})`, dashed: true } : line;
  });
}

function comparedTable(runs, rows) {
  const heads = [[""], ...runs.map((run, place) => [[h("i", { class: "key", style: { background: `var(--s${place % 8})` } }), run.label], true])];
  return h("div", { class: "card" }, table(heads, rows));
}

function comparedResults(runs) {
  const of = (name, value) => [name, ...runs.map((run) => value(run))];
  const passes = (run) => run.summary.evaluations.map((row) => row["eval/pass@1"]).filter((value) => value !== undefined && value !== null);
  const rollout = (run) => run.summary.seconds.decode + run.summary.seconds.tail_idle + (run.summary.seconds.imbalance || 0);
  return comparedTable(runs, [
    of("state", (run) => stateOf(run)[1]), of("steps", (run) => count(run.summary.steps.total)), of("wall time", (run) => seconds(run.summary.wall_s)),
    of("held-out pass@1, first", (run) => number(passes(run)[0], 3)), of("held-out pass@1, last", (run) => number(passes(run).pop(), 3)),
    of("held-out pass@1, best", (run) => (passes(run).length ? number(Math.max(...passes(run)), 3) : "–")),
    ...(runs.some((run) => run.paired) ? [of("held-out pass@1, last, minus the first run's on the same prompts (± standard error over prompts, not over seeds)", (run) => (run.paired ? `${run.paired.difference < 0 ? "−" : "+"}${number(Math.abs(run.paired.difference), 3)}${run.paired.error === null ? "" : ` ± ${number(run.paired.error, 3)}`} (${count(run.paired.prompts)} prompts)` : "–"))] : []),
    of("training reward, last steps", (run) => number(run.summary.training_reward.last, 3)),
    of("a step", (run) => seconds(run.summary.steps.mean_step_s)), of("tokens trained on", (run) => count(run.summary.tokens.trained)),
    of("trained tokens per second", (run) => number(run.summary.steps.total ? run.summary.tokens.trained / (run.summary.steps.mean_step_s * run.summary.steps.total) : null)),
    of("idle slots in rollouts", (run) => percent(rollout(run) ? run.summary.seconds.tail_idle / rollout(run) : null)),
    of("mean length trained, last 50 steps", (run) => number(run.summary.lengths.trained_mean, 1)), of("the policy's own", (run) => number(run.summary.lengths.policy_mean, 1)),
  ]);
}

/** Runs that differ in their seeds alone, and how far groups of them lie apart. */
function comparedGroups(groups) {
  if (!groups.length) return null;
  const rows = groups.map((group) => [group.names.join(", "), count(group.seeds), group.steps, number(group.mean, 3), number(group.deviation, 3), group.difference]);
  return h("div", { class: "card", style: { "margin-top": "14px" } }, h("h3", {}, "The same settings, other seeds"),
    table([["runs"], ["seeds", true], ["last evaluation, after step", true], ["its pass@1, mean", true], ["standard deviation over seeds", true], ["minus the first group's (± standard error over seeds)", true]], rows));
}

function comparedSeconds(runs) {
  const longest = Math.max(...runs.map((run) => run.summary.wall_s), 1e-9);
  const bars = runs.map((run) => h("div", {}, h("div", { class: "small muted" }, `${run.label}: ${seconds(run.summary.wall_s)}`), h("div", { class: "stack", style: { width: (100 * run.summary.wall_s) / longest + "%", margin: "3px 0 10px" } }, Object.entries(run.summary.seconds).map(([cause, s]) => h("i", { style: { width: (100 * s) / (run.summary.wall_s || 1) + "%", background: `var(--${cause})` }, pointermove: (event) => tip.show(event.clientX, event.clientY, h("b", {}, words(cause)), ` ${seconds(s)}`), pointerleave: tip.hide })))));
  const causes = Object.keys(runs[0].causes).filter((cause) => runs.some((run) => cause in run.summary.seconds));
  const rows = causes.map((cause) => [[h("i", { class: "key", style: { background: `var(--${cause})` } }), words(cause)], ...runs.map((run) => `${seconds(run.summary.seconds[cause] || 0)} (${percent(run.summary.wall_s ? (run.summary.seconds[cause] || 0) / run.summary.wall_s : null, 0)})`)]);
  return [h("div", { class: "card" }, bars), h("div", { style: { height: "14px" } }), comparedTable(runs, rows)];
}

function comparedSettings(runs) {
  const all = runs.map((run) => new Map(run.settings.map(([key, value]) => [key, value]))), normal = new Map(runs.flatMap((run) => run.settings.map(([key, , of]) => [key, of])));
  const keys = [...new Set(runs.flatMap((run) => run.settings.map(([key]) => key)))].filter((key) => key !== "name");
  const differ = keys.filter((key) => new Set(all.map((of) => (of.has(key) ? of.get(key) : normal.get(key)))).size > 1);
  if (!differ.length) return [h("p", { class: "muted" }, "Their settings are the same, but for their names.")];
  return [comparedTable(runs, differ.map((key) => [h("code", {}, key), ...all.map((of) => (of.has(key) ? h("code", {}, of.get(key)) : h("span", { class: "muted" }, normal.get(key) === null ? "not set" : [h("code", {}, normal.get(key)), " (default)"])))]))];
}
