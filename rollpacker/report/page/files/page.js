// Puts the page together: sections, theme, and for a live page the questions to its server.

const kindOfPage = document.documentElement.dataset.kind;

const theme = {
  get() { try { return localStorage.getItem("rollpacker-theme"); } catch { return null; } },
  set(value) { try { localStorage.setItem("rollpacker-theme", value); } catch { /* a file may not */ } },
  start() {
    const dark = matchMedia("(prefers-color-scheme: dark)"), button = document.getElementById("theme");
    const apply = (value) => {
      document.documentElement.dataset.theme = value;
      button.textContent = value === "dark" ? "☀ light" : "☾ dark";
      button.setAttribute("aria-label", `Switch to ${value === "dark" ? "light" : "dark"} colours`);
      charts.draw();
      document.dispatchEvent(new Event("themed"));
    };
    apply(this.get() || (dark.matches ? "dark" : "light"));
    dark.addEventListener("change", () => { if (!this.get()) apply(dark.matches ? "dark" : "light"); });
    button.addEventListener("click", () => { const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; this.set(next); apply(next); });
  },
};

function section(id, title, lead, ...children) {
  return h("section", { id, "aria-label": title }, h("h2", {}, title), lead ? h("p", { class: "lead" }, lead) : null, children);
}

function navigation(sections) {
  const links = sections.map(([id, title]) => h("a", { href: "#" + id }, title));
  document.getElementById("nav").replaceChildren(...links);
  const seen = new Map();
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) seen.set(entry.target.id, entry.isIntersecting);
    const first = sections.find(([id]) => seen.get(id));
    for (const link of links) first && link.hash === "#" + first[0] ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
  }, { rootMargin: "-60px 0px -55% 0px" });
  for (const [id] of sections) { const element = document.getElementById(id); if (element) observer.observe(element); }
}

function curveTools({ metrics }) {
  charts.smoothing = metrics.num_steps >= 60 && charts.chosen === undefined ? 0.8 : charts.chosen || 0;
  const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: charts.smoothing, "aria-label": "Smoothing", input: () => { charts.chosen = charts.smoothing = Number(slider.value); charts.draw(); } });
  const reset = h("button", { type: "button", click: () => charts.zoom(null), hidden: charts.range === null }, "All steps");
  document.addEventListener("zoomed", () => { reset.hidden = charts.range === null; });
  const honest = metrics.of > 1 ? `Each point is the mean of ${metrics.of} steps, the band their least and most.` : "Every step is a point.";
  return h("div", { class: "tools" }, h("label", {}, "Smoothing ", slider), reset, h("span", {}, `${honest} With smoothing the measured values stay behind the curve. Drag over a chart to look at some steps; a double click shows all.`));
}

/** One run. `update` shows another state of it, and leaves alone what its reader has set. */
function report(first) {
  const held = { run: first }, keptCharts = new Map(), grid = () => h("div", { class: "grid" });
  const sections = [
    ["overview", "Overview"], ["learning", "Learning"], ["lengths", "Lengths"], ["time", "Time"], ["timeline", "Timeline"],
    ...(first.summary.episodes ? [["episodes", "Episodes"]] : []), ["checks", "Checks"], ["samples-section", "Samples"], ["settings", "Settings"], ["metrics", "All metrics"],
  ];
  const samplesHere = h("div", {}, h("p", { class: "muted" }, "Samples are unpacked when they are looked at."));
  const learning = grid(), lengths = grid(), causes = h("div", { style: { "margin-bottom": "14px" } }), time = grid();
  const overview = h("section", { id: "overview", "aria-label": "Overview" }), lengthsLead = h("p", { class: "lead" });
  const timelineLead = h("p", { class: "lead" }), timelineHere = h("div"), episodesHere = h("div"), checksHere = h("div"), settingsHere = h("div");
  let timeline = null;
  const same = (element, children) => {
    const now = children.flat().filter(Boolean);
    if (now.length !== element.children.length || now.some((child, place) => element.children[place] !== child)) element.replaceChildren(...now);
  };
  const update = (run) => {
    held.run = run;
    run.charts = keptCharts;
    const lead = run.summary.lengths.tail_trained_share, detailed = run.time_line.num_detailed, steps = run.summary.steps.total;
    overview.replaceChildren(...[heading(run), tiles(run), h("div", { class: "two" }, whereSecondsWent(run), h("div", { style: { display: "grid", gap: "14px" } }, health(run), rounds(run)))].flat());
    same(learning, [chartsOf(run, LEARNING.slice(0, 3)), rewardsByName(run), chartsOf(run, LEARNING.slice(3)), clipsByUpdate(run)]);
    same(lengths, chartsOf(run, LENGTHS));
    lengthsLead.textContent = `What was trained on, and what the policy writes by itself.${lead === null ? "" : ` Its longest 5 % were trained on ${percent(lead, 0)} as often as the others.`}`;
    same(causes, [secondsByStep(run)]);
    const kept = time.querySelector(".counts"), now = tokens(run);
    now.classList.add("counts");
    if (kept) kept.replaceWith(now);
    same(time, [...chartsOf(run, TIME), now]);
    timelineLead.textContent = `Every bar is a sample, from its launch to its end, the longest at the bottom; below them what else the run did.${detailed < steps ? ` This page has the samples of ${count(detailed)} of ${count(steps)} steps: the first, the last and the longest.` : ""} Drag to move, Ctrl and wheel to zoom; a click on a bar shows the sample.`;
    if (timeline) timeline.replace(run.time_line);
    else if (run.time_line.step.length) { timeline = new TimeLine(run.time_line); timelineHere.replaceChildren(timeline.element); }
    else timelineHere.replaceChildren(h("p", { class: "muted" }, "No step has ended yet."));
    episodesHere.replaceChildren(...episodes(run));
    checksHere.replaceChildren(...checks(run).filter(Boolean));
    document.dispatchEvent(new Event("updated"));
  };
  update(first);
  settingsHere.replaceChildren(...settings(first).filter(Boolean));
  const body = [
    overview, section("learning", "Learning", null, curveTools(first), learning),
    h("section", { id: "lengths", "aria-label": "Lengths" }, h("h2", {}, "Lengths"), lengthsLead, lengths),
    section("time", "Time", "The causes add up to the wall time exactly.", causes, time),
    h("section", { id: "timeline", "aria-label": "Timeline" }, h("h2", {}, "Timeline"), timelineLead, timelineHere),
    first.summary.episodes ? section("episodes", "Episodes", "Turns with environments: how long they took, how trajectories ended, and what was lost.", episodesHere) : null,
    section("checks", "Checks", "How long verdicts took, and which were slowest.", checksHere),
    section("samples-section", "Samples", null, samplesHere),
    section("settings", "Settings", "What was set to something else than its default.", settingsHere),
    section("metrics", "All metrics", null, explorer(held)),
  ];
  return { body: body.filter(Boolean), sections, samplesHere, update };
}

const footer = () => h("footer", {}, `Made by RollPacker ${document.querySelector("meta[name=generator]").content.split(" ")[1]}. ${kindOfPage === "live" ? "It reads the run's files on this machine, and changes nothing." : "This page holds all it needs and asks no network for anything."}`);

/** Unpack the samples when the reader comes near them, or nothing else is to be done. */
function lazily(element, load) {
  let begun = null;
  const start = () => (begun = begun || load().then((data) => {
    if (!data || !data.num) { element.replaceChildren(h("p", { class: "muted" }, "No sample was written yet (with each checkpoint), or save_samples is off.")); return null; }
    const browser = new Samples(data);
    element.replaceChildren(browser.element);
    window.rollpackerSamples = browser;
    return browser;
  }).catch((error) => { element.replaceChildren(h("p", { class: "message" }, `The samples cannot be read: ${error.message}`)); return null; }));
  new IntersectionObserver((entries, observer) => { if (entries.some((one) => one.isIntersecting)) { observer.disconnect(); start(); } }, { rootMargin: "800px" }).observe(element);
  document.addEventListener("sample", async (event) => {
    const browser = await start();
    document.getElementById("samples-section").scrollIntoView();
    if (browser && !browser.find(event.detail)) browser.detail.replaceChildren(h("p", { class: "muted" }, h("code", {}, event.detail), " is not among the samples of this page."));
  });
  return start;
}

function fill(run) {
  const main = document.getElementById("main"), made = report(run);
  main.replaceChildren(...made.body, footer());
  navigation(made.sections);
  return made;
}

async function start() {
  theme.start();
  const main = document.getElementById("main");
  try {
    if (kindOfPage === "live") { await live(); return; }
    const made = fill(await embedded("core"));
    lazily(made.samplesHere, () => embedded("samples"));
    requestAnimationFrame(() => requestAnimationFrame(() => { document.documentElement.dataset.ready = performance.now().toFixed(0); }));
  } catch (error) {
    main.replaceChildren(h("p", { class: "message" }, `This page cannot be shown: ${error.message}. It needs a browser of 2023 or newer.`));
    throw error;
  }
}
