// A live page: asks its own server what is new, every second while it is looked at.

const ASK_MS = 1000;

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (answer.status === 404) return { gone: true };
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  const packed = answer.headers.get("content-type") === "application/octet-stream";
  return packed ? unpack(await answer.arrayBuffer()) : answer.json();
}

function every(act) {
  let running = false;
  const go = async () => { if (running || document.hidden) return; running = true; try { await act(); } finally { running = false; } };
  document.addEventListener("visibilitychange", go);
  setInterval(go, ASK_MS);
  return go();
}

async function live() {
  const path = location.pathname;
  if (path.startsWith("/run/")) await liveRun(path.slice(5)); else await liveList();
  document.documentElement.dataset.ready = performance.now().toFixed(0);
}

function liveList() {
  const main = document.getElementById("main"), body = h("div", { class: "card runs" });
  main.replaceChildren(h("h1", {}, "Runs"), h("p", { class: "lead" }, "The newest first; the page of each follows it while it goes on."), body, footer());
  return every(async () => {
    let rows;
    try { rows = await ask("/api/runs"); } catch { body.replaceChildren(h("p", { class: "message" }, "The dashboard does not answer: was it ended?")); return; }
    const pill = ([level, text]) => h("span", { class: "pill " + level }, text);
    const state = (row) => pill(isOver(row) ? ended(row) : row.quiet_s < 60 ? ["live", "running"] : ["", `quiet for ${seconds(row.quiet_s)}`]);
    const told = rows.map((row) => [h("a", { href: row.link }, row.name), state(row), count(row.steps), row.wall_s === undefined ? "–" : seconds(row.wall_s), number(row.reward, row.reward === null || row.reward === undefined ? undefined : 3), number(row.passed, row.passed === null || row.passed === undefined ? undefined : 3)]);
    body.replaceChildren(rows.length ? table([["run"], ["state"], ["steps", true], ["wall time", true], ["reward", true], ["pass@1", true]], told) : h("p", { class: "message" }, "There is no run here yet."));
  });
}

function liveRun(name) {
  const main = document.getElementById("main"), note = h("div", { class: "head", role: "status" });
  let version = "", made = null, shown_ = null, samplesOf = -1;
  const back = h("a", { href: "/" }, "← all runs");
  const tell = (level, text) => note.replaceChildren(back, h("span", { class: "pill " + level }, text));
  main.replaceChildren(note, h("p", { class: "muted" }, "Reading the event log …"));
  return every(async () => {
    let found;
    try { found = await ask(`/api/run/${name}?have=${encodeURIComponent(version)}`); } catch { tell("bad", "the dashboard does not answer: was it ended?"); return; }
    if (found.gone) { version = ""; tell("bad", shown_ ? "the run's folder is gone; this is what it was" : "there is no such run"); if (!made) main.replaceChildren(note); return; }
    const state = found.state || found;
    if (found.run) {
      version = state.version; shown_ = found.run;
      document.title = plain(`${found.run.name} · RollPacker`);
      if (made) made.update(found.run);
      else {
        made = report(found.run);
        main.replaceChildren(note, ...made.body, footer());
        navigation(made.sections);
        const again = h("button", { type: "button", class: "button", click: () => load() }, "Read the samples");
        const load = async () => {
          samplesOf = shown_.last_step;
          const data = await ask(`/api/run/${name}/samples`);
          if (!data.num) { made.samplesHere.replaceChildren(h("p", { class: "muted" }, "No sample was written yet (with each checkpoint), or save_samples is off. "), again); return; }
          const browser = (window.rollpackerSamples = new Samples(data));
          again.textContent = "Read them anew";
          made.samplesHere.replaceChildren(h("div", { class: "tools" }, again, h("span", {}, `as of step ${count(samplesOf)}`)), browser.element);
        };
        made.samplesHere.replaceChildren(again);
        document.addEventListener("sample", async (event) => {
          if (!window.rollpackerSamples) await load();
          document.getElementById("samples-section").scrollIntoView();
          if (window.rollpackerSamples) window.rollpackerSamples.find(event.detail);
        });
      }
      document.documentElement.dataset.step = found.run.last_step;
    }
    // Making the page of a long run takes a while: until then it says how old it is.
    const older = shown_.last_step === state.step ? "" : ` (below: as of step ${count(shown_.last_step)})`;
    if (state.problem) tell("bad", "the event log cannot be read on");
    else if (state.read < 0.999 && !isOver(shown_.summary)) tell("live", `reading the event log: ${percent(state.read, 0)}`);
    else if (isOver(shown_.summary)) note.replaceChildren(back); // the heading has it
    else if (state.quiet_s < 60) tell("live", `step ${count(state.step + 1)}: ${words(state.phase)}${state.live ? `, ${counted(state.live, "sample")} in the engine` : ""}${older}`);
    else tell("warning", `nothing written for ${seconds(state.quiet_s)}`);
  });
}
