// Asks the gateway every PERIOD_MS, while somebody looks, and shows what it says. What came over the network becomes
// text nodes and nothing else; the page's Content-Security-Policy holds the browser to that (require-trusted-types-for).
(() => {
  const { node, count, seconds, duration, share, bytes } = Nodes;
  const PERIOD_MS = 2000, NUM_REQUESTS = 200, NUM_SHOWN = 20, MAX_ROWS = 200, WINDOW_MS = 10000;
  const KEY = "baton-admin-key", COSTS = "admin/costs?by=tenant", COSTS_MS = 60000;
  const POOLS = ["prefill", "decode", "colocated"];
  const STYLES = {
    ready: "good", open: "good", stop: "good", length: "good", done: "good", tool_calls: "good", running: "", waiting: "warn",
    draining: "warn", joining: "warn", left: "warn", opening: "warn", cancelled: "warn", lost: "bad",
    incompatible: "bad", quarantined: "bad", stuck: "bad",
  };
  const page = document.documentElement.dataset;
  const at = (id) => document.getElementById(id);
  const shown = new Map();  // what each part shows, so that a part that has not changed keeps its selection
  const samples = [];       // of the counters, for rates
  const places = new Map(); // the cursors of the charts
  let asked = "", job = null, timer = 0, turns = 0, heard = null, points = [], period_s = 10, remembered = 0, counted = -COSTS_MS;

  // -- what is told becomes nodes -------------------------------------------------------------------------------------

  function show(id, data, build) {
    const said = JSON.stringify(data);
    if (shown.get(id) === said) return;
    shown.set(id, said);
    const focused = document.activeElement?.dataset?.request;
    at(id).replaceChildren(...[build(data)].flat());
    if (focused && !at(id).contains(document.activeElement)) focusOn(focused, id);
  }

  function focusOn(request, id) {
    [...at(id).querySelectorAll("[data-request]")].find((one) => one.dataset.request === request)?.focus();
  }

  // A column is [heading, class, cell of a row]; a cell is text or a node.
  function table(columns, rows, empty) {
    if (!rows.length) return node("p", { class: "dim" }, empty);
    const line = (tag, cell) => node("tr", {}, ...columns.map((column) => node(tag, { class: column[1] }, cell(column))));
    const body = node("tbody", {}, ...rows.slice(0, MAX_ROWS).map((row) => line("td", (column) => column[2](row))));
    const made = node("table", {}, node("thead", {}, line("th", (column) => column[0])), body);
    const more = rows.length - MAX_ROWS;
    return more > 0 ? [made, node("p", { class: "dim" }, `and ${count(more)} more: ${command("status")}`)] : made;
  }

  const styled = (text, style) => node("span", { class: style ?? STYLES[text] ?? "" }, text);
  const onHost = (all, host) => `${count(all)}${host ? ` (${count(host)} host)` : ""}`;

  // The smallest that so many parts of the values do not exceed.
  function quantiles(values, parts) {
    const sorted = values.filter((one) => one !== null).sort((a, b) => a - b);
    return parts.map((part) => sorted[Math.max(0, Math.ceil(part * sorted.length) - 1)]);
  }

  // -- the parts ------------------------------------------------------------------------------------------------------

  const poolOf = (worker) => worker.info?.role ?? "unknown";
  const rank = (worker) => (POOLS.indexOf(poolOf(worker)) + POOLS.length + 1) % (POOLS.length + 1);
  const sum = (workers, of) => workers.reduce((whole, one) => whole + of(one.load), 0);
  const used = (load) => load.num_blocks - load.num_free_blocks;
  const isHere = (worker) => ["ready", "draining"].includes(worker.state);

  function kvUse(part, whole) {
    if (!whole) return "-";
    return node("span", {}, node("meter", { min: 0, max: whole, value: part, title: `${count(part)} of ${count(whole)} blocks` }), ` ${share(part, whole)}`);
  }

  function pools({ workers, losses }) {
    const rows = [...new Set(workers.map(poolOf))].map((name) => {
      const members = workers.filter((one) => poolOf(one) === name);
      return { name, members, live: members.filter(isHere) };
    });
    return table([
      ["pool", "word", (row) => row.name],
      ["ready", "number", (row) => {
        const ready = row.members.filter((one) => one.state === "ready").length;
        return styled(`${ready}/${row.members.length}`, ready === row.members.length ? "good" : "bad");
      }],
      ["running", "number", (row) => count(sum(row.live, (load) => load.num_running))],
      ["waiting", "number", (row) => count(sum(row.live, (load) => load.num_waiting))],
      ["queued tokens", "number spare", (row) => count(sum(row.live, (load) => load.queued_prefill_tokens))],
      ["KV use", "number", (row) => kvUse(sum(row.live, used), sum(row.live, (load) => load.num_blocks))],
      ["lost", "number", (row) => count(losses[row.name] ?? 0)],
      ["tickets", "number spare", (row) => count(sum(row.live, (load) => load.num_tickets))],
      ["KV moved", "number spare", (row) => bytes(sum(row.live, (load) => load.transfer_bytes))],
    ], rows, "No worker has joined yet.");
  }

  // What one that is away last told of its load is no news: it has none.
  const ifHere = (cell) => (one) => (isHere(one) ? cell(one) : "-");

  const workerTable = (workers) => table([
    ["worker", "word", (one) => one.worker_id],
    ["state", "reason", (one) => styled(one.reason ? `${one.state}: ${one.reason}` : one.state, STYLES[one.state])],
    ["on", "spare rare", (one) => one.info?.device ?? "?"],
    ["address", "spare rare", (one) => one.address],
    ["running", "number", ifHere((one) => count(one.load.num_running))],
    ["waiting", "number", ifHere((one) => count(one.load.num_waiting))],
    ["KV use", "number", ifHere((one) => kvUse(used(one.load), one.load.num_blocks))],
    ["cached blocks", "number spare", ifHere((one) => onHost(one.num_cached_blocks, one.num_host_blocks))],
    ["prefill tok/s", "number spare rare", ifHere((one) => (one.load.prefill_tokens_per_s ? count(one.load.prefill_tokens_per_s) : "-"))],
    ["step", "number spare rare", ifHere((one) => (one.load.decode_step_s ? seconds(one.load.decode_step_s) : "-"))],
  ], workers, "No worker has joined yet.");

  // LoRA adapters; one of which hosts have other files stands once for each.
  function adapters(workers) {
    const rows = new Map();
    for (const worker of workers.filter(isHere)) {
      for (const one of worker.info?.adapters ?? []) {
        const row = rows.get(`${one.name} ${one.adapter_id}`) ?? { ...one, workers: [] };
        row.workers.push(worker.worker_id);
        rows.set(`${one.name} ${one.adapter_id}`, row);
      }
    }
    return [...rows.values()].sort((a, b) => a.name.localeCompare(b.name));
  }

  const adapterTable = (rows) => table([
    ["adapter", "word", (one) => one.name],
    ["rank", "number", (one) => count(one.rank)],
    ["size", "number", (one) => bytes(one.num_bytes)],
    ["workers", "reason", (one) => one.workers.join(", ")],
    ["folder", "spare rare", (one) => one.path],
  ], rows, "");

  const laneTable = (lanes) => table([
    ["worker", "word", (one) => one.worker_id],
    ["peer", "word", (one) => {
      const [name, incarnation] = one.peer.split("#");
      return incarnation ? node("span", {}, name, node("span", { class: "spare" }, `#${incarnation}`)) : name;
    }],
    ["over", "reason", (one) => (one.reason && one.state === "open" ? `${one.transport}: ${one.reason}` : one.transport)],
    ["state", "reason", (one) => styled(one.reason && one.state !== "open" ? `${one.state}: ${one.reason}` : one.state, STYLES[one.state])],
    ["moved", "number spare", (one) => bytes(one.num_bytes)],
    ["speed", "number spare", (one) => (one.busy_s ? `${bytes(one.num_bytes / one.busy_s)}/s` : "-")],
    ["idle", "number spare", (one) => duration(one.idle_s)],
  ], lanes, "");

  const added = (columns) => columns.reduce((whole, one) => one.map((count, at) => count + (whole[at] ?? 0)).concat(whole.slice(one.length)), []);

  // Drafts of each pool by source; a whole pool's figures stand in its first row.
  function speculation(workers) {
    const rows = [];
    for (const name of new Set(workers.map(poolOf))) {
      const loads = workers.filter((one) => poolOf(one) === name && isHere(one)).map((one) => one.load.speculation).filter((one) => one);
      const total = (of) => loads.reduce((whole, one) => whole + one[of], 0);
      if (!total("num_rows")) continue;
      const all = loads.flatMap((one) => one.sources), sources = [...new Set(all.map((one) => one.source))];
      (sources.length ? sources : [""]).forEach((source, at) => {
        const own = all.filter((one) => one.source === source);
        const drafted = added(own.map((one) => one.drafted_at)), accepted = added(own.map((one) => one.accepted_at));
        const paused = loads.flatMap((one) => one.paused).filter((one) => one.source === source).length;
        rows.push({ name, source, drafted, accepted, paused, whole: at ? null : { tokens: total("num_tokens") / total("num_rows"), saved: total("spared_s") - total("spent_s") } });
      });
    }
    return rows;
  }

  const whole = (counts) => counts.reduce((all, one) => all + one, 0);
  const speculationTable = (rows) => table([
    ["pool", "word", (one) => one.name],
    ["drafts of", "word", (one) => (one.source || "-") + (one.paused ? " (paused)" : "")],
    ["drafted", "number spare", (one) => count(whole(one.drafted))],
    ["accepted", "number", (one) => share(whole(one.accepted), whole(one.drafted))],
    ["by position", "number spare rare", (one) => one.drafted.map((drafted, at) => share(one.accepted[at], drafted)).join(", ")],
    ["tokens a step", "number", (one) => (one.whole ? one.whole.tokens.toFixed(2) : "")],
    ["saved", "number", (one) => (one.whole ? seconds(Math.max(0, one.whole.saved)) : "")],
  ], rows, "");

  const processTable = (ports) => table([["port of its own, with its metrics and its page", "word", String]], ports, "");

  // A vector has no last token whose reason could be told.
  const outcome = (one) => (one.embedding && one.outcome === "length" ? "done" : one.outcome || one.state);
  const outcomeStyle = (one) => (one.outcome && !(one.outcome in STYLES) ? "bad" : undefined);

  function requestTable(requests) {
    return table([
      ["request", "", (one) => {
        const link = node("button", { type: "button", class: "link", "data-request": one.request_id, title: "why it was routed as it was" }, one.request_id);
        link.addEventListener("click", () => ask(one.request_id));
        return link;
      }],
      ["at", "word spare rare", (one) => new Date(1000 * one.received_at).toLocaleTimeString()],
      ["state", "", (one) => styled(outcome(one), outcomeStyle(one))],
      ["prompt", "number spare", (one) => count(one.prompt_tokens)],
      ["cached", "number spare", (one) => count(one.cached_tokens)],
      ["output", "number spare", (one) => count(one.output_tokens)],
      ["TTFT", "number", (one) => seconds(one.ttft_s)],
      ["TPOT", "number", (one) => seconds(one.tpot_s)],
      ["read by", "word spare", (one) => one.prefill ?? one.decode ?? "-"],
      ["written by", "word spare", (one) => one.decode ?? "-"],
    ], requests.slice(0, NUM_SHOWN), "No request has come to this gateway yet: try the one below.");
  }

  function figures({ numbers, rates }) {
    const told = [
      ["requests in flight", count(numbers.in_flight)],
      ["in line at the gateway", count(numbers.waiting)],
      ["output tokens/s", rates ? count(rates.output) : "-"],
      ["prompt tokens/s", rates ? count(rates.prompt) : "-"],
      ["prompt tokens cached", share(numbers.cached, numbers.prompt)],
      ["requests ended", count(numbers.requests)],
    ];
    return told.map(([name, value]) => node("div", {}, node("dt", {}, name), node("dd", {}, value)));
  }

  function latencies(requests) {
    const rows = [["first token", (one) => one.ttft_s], ["between tokens", (one) => one.tpot_s], ["whole answer", (one) => one.seconds]]
      .map(([name, of]) => ({ name, values: requests.map(of).filter((one) => one !== null) }))
      .map((row) => ({ ...row, parts: quantiles(row.values, [0.5, 0.95, 0.99]) }));
    return table([
      ["", "", (row) => row.name],
      ...["p50", "p95", "p99"].map((name, place) => [name, "number", (row) => seconds(row.parts[place])]),
      ["of the last", "number spare", (row) => count(row.values.length)],
    ], rows, "");
  }

  const errorTable = (errors) => table([
    ["kind", "", (one) => one.kind], ["since the start", "number", (one) => styled(count(one.number), "bad")],
  ], errors, "");

  // -- why a request went where it went -------------------------------------------------------------------------------

  function way(choice) {
    if (choice.decode === null) return `${choice.prefill} computes the vector`;
    return choice.prefill ? `${choice.prefill} prefills, ${choice.decode} decodes` : `${choice.decode} alone${choice.single_worker ? ` (${choice.single_worker})` : ""}`;
  }

  // A decision after a failure had its first token before it, and one that failed has no figures: these are left out.
  function predicted(what, name, choice) {
    const { load_s, num_host_tokens } = choice.expected, load = name === "ttft_s" && num_host_tokens ? ` (load ${seconds(load_s)})` : "";
    const measured = choice.measured?.[name];
    return `${what} ${seconds(choice.expected[name])}${load} expected${measured != null ? `, ${seconds(measured)} measured` : ""}`;
  }

  function shadow(one) {
    const way = one.prefill ? `${one.prefill} and ${one.decode}` : `${one.decode} alone`, difference_s = one.ttft_difference_s;
    return `${one.policy} would have taken ${way}: first token ${difference_s < 0 ? "-" : "+"}${seconds(Math.abs(difference_s))}`;
  }

  // A table for each role, whose costs differ. Costs are seconds, or have no unit.
  function decision(choice) {
    const scores = choice.scores.map((one) => ({ ...one, terms: Object.fromEntries(Object.entries(one.terms)
      .map(([name, cost]) => [name.startsWith("prefill by ") ? "prefill" : name, cost])) }));
    const cached = new Map(choice.candidates.map((one) => [one.worker_id, onHost(one.num_cached_tokens, one.num_host_tokens)]));
    const [unit, scale] = choice.cost_unit === "s" ? [" (ms)", 1000] : ["", 1];
    const figure = (cost) => (Math.abs(cost) >= 999.5 ? count(cost) : Math.abs(cost) < 0.0005 ? "0" : String(Number(cost.toPrecision(3))));
    const cell = (cost) => (cost === undefined ? "" : figure(scale * cost));
    const costs = (role) => {
      const rows = scores.filter((one) => one.role === role).sort((a, b) => a.total - b.total);
      const names = [...new Set(rows.flatMap((one) => Object.keys(one.terms)))];
      return node("div", { class: "wide" }, ...[table([
        ["worker", "word", (one) => styled(one.worker_id, [choice.prefill, choice.decode].includes(one.worker_id) ? "good" : "")],
        [`total${unit}`, "number", (one) => node("strong", {}, cell(one.total))],
        ["role", "word", (one) => one.role],
        ["cached", "number", (one) => cached.get(one.worker_id) ?? "0"],
        ...names.map((name) => [`${name}${unit}`, "number", (one) => cell(one.terms[name])]),
      ], rows, "")].flat());
    };
    const roles = POOLS.filter((role) => scores.some((one) => one.role === role));
    return [
      node("p", {}, `after ${seconds(choice.at_s)}, ${choice.policy}: `, node("strong", {}, way(choice)),
        `; ${predicted("decision to first token", "ttft_s", choice)}; ${predicted("between tokens", "tpot_s", choice)}`),
      ...(roles.length ? roles.map(costs) : [node("p", { class: "dim" }, "No candidate was scored.")]),
      ...choice.shadows.map((one) => node("p", {}, shadow(one))),
    ];
  }

  function timeline(events) {
    const more = (event) => Object.entries(event).filter(([name, value]) => !["at_s", "what"].includes(name) && value !== "")
      .map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
    return node("div", { class: "wide" }, ...[table([
      ["at", "number", (one) => `${one.at_s.toFixed(3)} s`], ["what", "word", (one) => one.what], ["", "", more],
    ], events, "Nothing has happened to it yet.")].flat());
  }

  function cacheOf(miss) {
    const host = miss.num_expected_on_host ? `, ${count(miss.num_expected_on_host)} of them in host memory` : "";
    return [
      node("p", {}, `cache of ${miss.prefill_worker}: ${count(miss.num_found)} of ${count(miss.num_blocks)} blocks of ${miss.block_size} tokens found, ${count(miss.num_expected)} expected${host}`),
      node("ul", {}, ...miss.findings.map((one) => node("li", {}, node("strong", {}, one.reason), `: ${one.explanation}`))),
    ];
  }

  function explained({ name, jobs, misses, refusal }) {
    const close = node("button", { type: "button" }, "Close");
    close.addEventListener("click", leave);
    if (refusal) return [node("h3", {}, name), node("p", { class: "bad" }, refusal), close];
    const parts = jobs.flatMap((one) => [
      node("h3", {}, `${name} (${one.job})`),
      node("p", {}, styled(outcome(one), outcomeStyle(one)), `. ${count(one.prompt_tokens)} prompt tokens, ${count(one.cached_tokens)} of them cached; ${count(one.output_tokens)} tokens written${one.drafted_tokens ? `, ${count(one.accepted_drafts)} of them accepted of ${count(one.drafted_tokens)} drafted` : ""}${one.paused_drafts.length ? `; drafts of ${one.paused_drafts.join(", ")} were paused, since they did not pay` : ""}${one.ttft_s == null ? "" : `; TTFT ${seconds(one.ttft_s)}, from its arrival at the gateway`}`),
      ...(one.message ? [node("p", { class: "bad" }, one.message)] : []),
      ...Timeline.stages(one), ...one.choices.flatMap(decision), timeline(one.timeline), ...(misses[one.job] ? cacheOf(misses[one.job]) : []),
    ]);
    return [...parts, node("p", { class: "dim" }, "In a terminal: ", node("code", {}, command(`why ${quoted(name)}`))), close];
  }

  // Back to where it was asked.
  function leave() {
    const name = asked;
    ask("");
    focusOn(name, "requests");
  }

  async function ask(name) {
    asked = name;
    job = null;
    at("why").hidden = !name;
    if (name) {
      await explain();
      at("why").scrollIntoView({ block: "nearest" });
    }
  }

  async function explain() {
    const name = asked, path = `admin/requests/${encodeURIComponent(name)}`;
    let told;
    try {
      const [whole, cache] = await Promise.all([get(path), get(`${path}/cache`)]);
      told = { name, jobs: whole.jobs, misses: Object.fromEntries(cache.jobs.map((one) => [one.job, one.miss])) };
    } catch (error) {
      told = { name, refusal: error.message };
    }
    if (asked !== name) return;
    job = told;
    show("why", told, explained);
  }

  // -- asking ---------------------------------------------------------------------------------------------------------

  class Refused extends Error {
    constructor(status, message) {
      super(message);
      this.status = status;
    }
  }

  async function answer(path) {
    const key = sessionStorage.getItem(KEY), headers = key ? { authorization: `Bearer ${key}` } : {};
    const response = await fetch(path, { headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(10000) });
    if (response.ok) return response;
    const said = await response.json().catch(() => null);
    throw new Refused(response.status, said?.error?.message ?? `${path} answered ${response.status}`);
  }

  const get = async (path) => (await answer(path)).json();

  // Without the series of other models behind this address, which have a page of their own.
  function ofModel(text) {
    const own = page.model.replace(/[\\"]/g, "\\$&");
    return text.split("\n").filter((line) => {
      const found = /[{,]model="((?:[^"\\]|\\.)*)"/.exec(line);
      return !found?.[1] || found[1] === own;
    }).join("\n");
  }

  // The sum of every series of a name, over its labels.
  function totals(text, names) {
    const found = Object.fromEntries(Object.keys(names).map((name) => [name, 0]));
    for (const [, series, value] of text.matchAll(/^(\w+)(?:\{.*\})? (\S+)/gm)) {
      const name = Object.keys(names).find((one) => names[one] === series);
      if (name) found[name] += Number(value);
    }
    return found;
  }

  // The series of a name by one of their labels, without those that count nothing.
  function byLabel(text, name, label) {
    const found = {};
    for (const [, labels, value] of text.matchAll(new RegExp(`^${name}{(.*)} (\\S+)$`, "gm"))) {
      const key = labels.match(new RegExp(`(?:^|,)${label}="([^"]*)"`))?.[1];
      if (key && Number(value)) found[key] = (found[key] ?? 0) + Number(value);
    }
    return found;
  }

  function errorsOf(text) {
    const outcomes = Object.entries(byLabel(text, "baton_requests_total", "outcome")).filter(([kind]) => kind !== "ok");
    const refused = Object.entries(byLabel(text, "baton_admission_refused_total", "reason"));
    return [...outcomes, ...refused.map(([reason, number]) => [`refused by admission: ${reason}`, number])]
      .map(([kind, number]) => ({ kind, number })).sort((a, b) => b.number - a.number);
  }

  function rates(numbers) {
    const now = performance.now();
    if (samples.length && numbers.output < samples.at(-1).output) samples.length = 0;  // the gateway is a new one
    samples.push({ now, output: numbers.output, prompt: numbers.prompt });
    while (samples.length > 2 && now - samples[1].now >= WINDOW_MS) samples.shift();
    const first = samples[0], passed_s = (now - first.now) / 1000;
    if (!passed_s) return null;
    return { output: (numbers.output - first.output) / passed_s, prompt: (numbers.prompt - first.prompt) / passed_s };
  }

  function tell(status, ready, requests, numbers, metrics) {
    const workers = [...status.workers].sort((a, b) => rank(a) - rank(b) || a.worker_id.localeCompare(b.worker_id, "en", { numeric: true }));
    const lanes = workers.flatMap((one) => (status.kv[one.worker_id]?.lanes ?? []).map((lane) => ({ worker_id: one.worker_id, ...lane })));
    const state = at("state");
    state.textContent = !status.ready ? `not ready: ${status.reason}` : ready.degraded ? `ready, but ${ready.degraded}` : "ready";
    state.className = `pill ${!status.ready ? "bad" : ready.degraded ? "warn" : "good"}`;
    const errors = errorsOf(metrics), [version = ""] = Object.keys(byLabel(metrics, "baton_build_info", "version"));
    at("version").textContent = version;
    show("figures", { numbers, rates: rates(numbers) }, figures);
    show("latencies", requests, latencies);
    show("errors", errors, errorTable);
    at("errors-section").hidden = !errors.length;
    show("pools", { workers, losses: byLabel(metrics, "baton_pool_losses_total", "pool") }, pools);
    show("workers", workers, workerTable);
    const loaded = adapters(workers);
    show("adapters", loaded, adapterTable);
    at("adapters-section").hidden = !loaded.length;
    if (Capacity.isNews(status.capacity)) show("capacity", status.capacity, (report) => Capacity.shown(report, table));
    at("capacity-section").hidden = !Capacity.isNews(status.capacity);
    const drafts = speculation(workers);
    show("speculation", drafts, speculationTable);
    at("speculation-section").hidden = !drafts.length;
    show("lanes", lanes, laneTable);
    show("lane-map", { workers: workers.map((one) => [one.worker_id, one.state, one.info?.role]), lanes }, () => LaneMap.map(workers, lanes));
    at("lanes-section").hidden = !lanes.length;
    show("processes", status.processes, processTable);
    at("processes-section").hidden = !status.processes.length;
    show("requests", requests, requestTable);
    at("told").hidden = false;
    at("told").classList.remove("stale");
  }

  // The periods that have ended since the last look, and the latest known: a process may have been late with its part.
  async function remember(turn) {
    const now = performance.now();
    if (points.length && now - remembered < 1000 * period_s) return;
    const news = await get(`admin/history?since=${Math.max(0, (points.at(-1)?.at ?? 0) - period_s)}`);
    if (turn !== turns) return;
    [period_s, remembered] = [news.period_s, now];
    points = Charts.joined(points, news.points);
    const focused = document.activeElement?.dataset?.chart;
    show("charts", points, () => Charts.charts(points, period_s, places));
    if (focused) [...at("charts").querySelectorAll("[data-chart]")].find((one) => one.dataset.chart === focused)?.focus();
  }

  // The ledger's sums, once a minute: it reads all rows of a day.
  async function reckon(turn) {
    const now = performance.now();
    if (page.hasLedger !== "true" || now - counted < COSTS_MS) return;
    const report = await get(COSTS);
    if (turn !== turns) return;
    counted = now;
    show("money", report, () => table(Money.columns(report), report.rows, "No request in the last day."));
    at("idle").textContent = Money.idle(report);
    at("money-section").hidden = false;
  }

  // Of the looks under way only the latest may say anything: another one began before a key was given or forgotten.
  async function look() {
    const turn = turns;
    const names = {
      in_flight: "baton_requests_in_flight", waiting: "baton_admission_waiting", requests: "baton_requests_total",
      output: "baton_generated_tokens_total", prompt: "baton_prompt_tokens_total", cached: "baton_cached_tokens_total",
    };
    try {
      const [status, ready, latest, metrics] = await Promise.all([
        get("admin/status"), fetch("ready", { cache: "no-store" }).then((one) => one.json()),
        get(`admin/requests?limit=${NUM_REQUESTS}`), answer("metrics").then((one) => one.text()).then(ofModel),
      ]);
      if (turn !== turns) return;
      tell(status, ready, latest.requests, totals(metrics, names), metrics);
      await remember(turn);
      await reckon(turn);
      if (asked && !(job?.jobs?.every((one) => one.state === "ended"))) await explain();
      if (turn !== turns) return;
      heard = new Date();
      at("heard").textContent = `as of ${heard.toLocaleTimeString()}`;
      at("door").hidden = at("trouble").hidden = true;
      at("forget").hidden = !sessionStorage.getItem(KEY);
    } catch (error) {
      if (turn !== turns) return;
      if (error instanceof Refused && [401, 403].includes(error.status)) return shut(error);
      const since = heard ? `, what is shown is of ${heard.toLocaleTimeString()}` : "";
      at("trouble").textContent = `The gateway does not answer (${error.message})${since}. It is asked again every ${PERIOD_MS / 1000} s.`;
      at("trouble").hidden = false;
      at("told").classList.add("stale");
      at("state").textContent = "no answer";
      at("state").className = "pill bad";
    }
    timer = setTimeout(next, PERIOD_MS);
  }

  // Nothing is asked until there is another key: this one will not be better in two seconds.
  function shut(refusal) {
    const had = sessionStorage.getItem(KEY);
    forget();
    at("refusal").textContent = had ? refusal.message : "Whoever wants to see this cluster needs a key.";
    at("door").hidden = false;
    at("state").textContent = "needs a key";
    at("state").className = "pill warn";
    at("key").focus();
  }

  // The key, and what it has shown.
  function forget() {
    turns += 1;
    clearTimeout(timer);
    sessionStorage.removeItem(KEY);
    ask("");
    for (const id of shown.keys()) at(id).replaceChildren();
    shown.clear();
    heard = null;
    [points, counted] = [[], -COSTS_MS];
    at("money-section").hidden = true;
    at("heard").textContent = at("version").textContent = "";
    at("state").textContent = "asking ...";
    at("state").className = "pill";
    at("told").hidden = at("trouble").hidden = at("forget").hidden = true;
  }

  function next() {
    turns += 1;
    clearTimeout(timer);
    if (!document.hidden) look();
  }

  at("door").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, at("key").value.trim());
    at("key").value = "";
    next();
  });
  at("forget").addEventListener("click", () => {
    forget();
    next();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && asked) leave();
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && at("door").hidden) next();
  });

  // -- in a terminal --------------------------------------------------------------------------------------------------

  const root = new URL(".", location.href).href, gateway = root.replace(/\/$/, "");
  const quoted = (text) => (/^[\w.:/@%-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
  const command = (verb) => `baton ${verb}${gateway === page.cliUrl ? "" : ` --url ${quoted(gateway)}`}`;
  for (const one of document.querySelectorAll("[data-verb]")) one.textContent = command(one.dataset.verb);

  // -- a request to try -----------------------------------------------------------------------------------------------

  const isChat = page.hasChat === "true";
  const body = isChat
    ? { model: page.model, messages: [{ role: "user", content: "What does os.path.join do?" }] }
    : { model: page.model, prompt: "Once upon a time", max_tokens: 32 };
  const key = page.asksForKeys === "true" ? " -H 'authorization: Bearer YOUR_KEY'" : "";
  at("example").textContent = `curl ${root}v1/${isChat ? "chat/" : ""}completions${key} -H 'content-type: application/json' -d ${quoted(JSON.stringify(body))}`;
  at("copy").hidden = !navigator.clipboard;
  at("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(at("example").textContent);
    at("copy").textContent = "Copied";
  });
  Playground.mount(at("playground"), {
    model: page.model, hasChat: isChat, asksForKeys: page.asksForKeys === "true", admin: get, explain: ask,
  });

  next();
})();
