// The desired fleet: who changed it and why, and what the planner decided last.
const Capacity = (() => {
  const { node, share } = Nodes;
  const NUM_SHOWN = 8;
  const STATES = { reached: "good", "under way": "warn", replaced: "", failed: "bad" };

  const words = (counts) => Object.entries(counts).map(([role, number]) => `${number} ${role}`).join(" + ");
  const fleet = ({ counts, revision }) => words(counts) + (revision.name ? ` at revision ${revision.name}` : "");
  const clock = (at_s) => new Date(1000 * at_s).toLocaleTimeString();
  const milliseconds = (s) => `${Number((1000 * s).toPrecision(4))} ms`;
  const same = (one, other) => words(one) === words(other);

  // The decisions that differ from the one before, the latest first: a planner that keeps its fleet repeats itself.
  function turns(decisions) {
    const news = decisions.filter((one, at) => !at || one.change || one.refused || !same(one.counts, decisions[at - 1].counts));
    const latest = decisions.at(-1);
    return [...(news.includes(latest) ? [] : [latest]), ...news.reverse()].slice(0, NUM_SHOWN);
  }

  function planner({ planner }) {
    if (!planner) return [];
    const bounds = Object.entries(planner.least).map(([role, least]) => `${role} ${least} to ${planner.most[role]}`).join(", ");
    const lines = [`The planner keeps ${share(planner.attainment, 1)} of the requests within ${milliseconds(planner.ttft_s)} to the first token and ${milliseconds(planner.tpot_s)} between tokens, with ${bounds}.`];
    if (planner.manual_until_s) lines.push(`An operator's change holds until ${clock(planner.manual_until_s)}.`);
    if (planner.silent.length) lines.push(`Reports are late from ${planner.silent.join(", ")}: no worker goes meanwhile.`);
    return lines.map((one) => node("p", {}, one));
  }

  function shown(report, table) {
    const waiting = report.waiting_for.length ? `, waiting for ${report.waiting_for.join(", ")}` : "";
    const decisions = report.planner?.decisions ?? [];
    const parts = [node("p", {}, node("strong", {}, fleet(report.desired)), waiting), ...planner(report)];
    if (decisions.length) parts.push(...[table([
      ["decided at", "word", (one) => clock(one.at_s)],
      ["in time", "number", (one) => share(one.attainment, 1)],
      ["in line", "number spare", (one) => String(one.num_waiting)],
      ["decision", "word", (one) => (same(one.counts, one.desired) ? "keep" : words(one.counts))],
      ["why", "", (one) => `${one.reason}${one.refused ? `; refused: ${one.refused}` : ""}`],
    ], turns(decisions), "")].flat());
    if (report.changes.length) parts.push(...[table([
      ["changed at", "word", (one) => clock(one.at_s)],
      ["by", "", (one) => one.who || "an operator"],
      ["to", "word", (one) => fleet(one.after)],
      ["outcome", "word", (one) => node("span", { class: STATES[one.state] ?? "" }, one.state)],
      ["why", "", (one) => one.reason || one.why || (one.worker_id ? `${one.worker_id} changes its role` : "")],
    ], report.changes.slice(-NUM_SHOWN).reverse(), "")].flat());
    return parts;
  }

  // Nothing to show while the fleet is as its settings made it, and no planner runs.
  const isNews = (report) => Boolean(report && (report.changes.length || report.planner));

  return { shown, isNews };
})();
