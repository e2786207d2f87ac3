// One request's stages over time, from the events that the gateway recorded.
const Timeline = (() => {
  const { node, svg, seconds, count } = Nodes;
  const NEXT = {  // event: [the stage that it ends, the stage that it begins]
    arrived: ["", "receive"], received: ["receive", "queue"], admitted: ["queue", "route"], "prompt sent": ["route", "prefill"],
    "prompt computed": ["prefill", "transfer"], "first token": ["prefill", "decode"], "KV arrived": ["transfer", "decode"],
    "moved with its KV": ["decode", "decode"],
  };
  const MEANINGS = {
    receive: "the request is checked, and its prompt tokenised",
    queue: "waits in line at the gateway", route: "workers are chosen, and blocks reserved", prefill: "the prompt is computed",
    transfer: "KV moves to the decode worker", decode: "the answer is written", failed: "the attempt ended",
  };

  // Rows of the stages: {stage, worker, from_s, to_s, marks: [[at_s, words]], failed}. A stage that is under way ends at
  // the last event. Prefill and transfer overlap where blocks are pushed early: the transfer shown is what is left of it.
  function rows(events) {
    const found = [], open = new Map(), last_s = events.at(-1)?.at_s ?? 0;
    let pair = {}, first = false;
    const close = (stage, at_s, failed = "") => {
      if (!open.has(stage)) return;
      Object.assign(open.get(stage), { to_s: at_s, failed });
      open.delete(stage);
    };
    const begin = (stage, at_s, worker = "") => {
      if (open.has(stage)) return;
      const row = { stage, worker, from_s: at_s, to_s: last_s, marks: [], failed: "" };
      open.set(stage, row);
      found.push(row);
    };
    const mark = (at_s, words) => [...open.values()].at(-1)?.marks.push([at_s, words]);
    for (const event of events) {
      const [ends, begins] = NEXT[event.what] ?? [];
      if (event.what === "decided") pair = event;
      if (event.what === "first token") first = true;
      if (event.what === "attempt failed" || event.what === "ended") {
        for (const stage of [...open.keys()]) close(stage, event.at_s, event.what === "ended" ? "" : event.message ?? event.code);
        if (event.what === "attempt failed") begin("route", event.at_s);
      } else if (begins) {
        const worker = { prefill: event.worker, transfer: `${pair.prefill} to ${pair.decode}`, decode: event.worker ?? pair.decode }[begins];
        close(ends, event.at_s);
        if (!open.size) begin(begins, event.at_s, worker);
        if (event.what === "moved with its KV") mark(event.at_s, `moved from ${event.source}`);
        if (event.what === "first token") mark(event.at_s, "first token");
      } else if (event.what === "part of the prompt computed") {
        mark(event.at_s, `${count(event.tokens)} prompt tokens computed`);
      } else if (event.what === "prefix pulled") {
        mark(event.at_s, `${count(event.blocks)} blocks pulled from ${event.source}`);
      } else if (event.what === "blocks reserved") {
        mark(event.at_s, `${count(event.blocks)} blocks reserved on ${event.worker}`);
      }
    }
    return { rows: found, whole_s: last_s, first };
  }

  // Places are shares of the width: text and lines keep their size on a phone.
  function bar({ stage, from_s, to_s, marks, failed }, whole_s) {
    const place = (at_s) => `${(100 * at_s) / (whole_s || 1)}%`;
    return svg("svg", { class: "bar", "aria-hidden": "true" },
      svg("line", { class: "rule", x1: "0", x2: "100%", y1: "50%", y2: "50%" }),
      svg("rect", { class: failed ? "failed" : `stage-${stage}`, x: place(from_s), width: place(Math.max(to_s - from_s, whole_s / 400)), y: "3", height: "12", rx: "2" }),
      ...marks.map(([at_s, words]) => svg("line", { class: "mark", x1: place(at_s), x2: place(at_s), y1: "0", y2: "18" }, svg("title", {}, words))));
  }

  function stages(job) {
    const { rows: found, whole_s } = rows(job.timeline);
    if (!found.length) return [];
    const line = (row) => node("tr", {},
      node("td", { class: "word", title: MEANINGS[row.stage] }, row.stage),
      node("td", { class: "worker" }, row.worker),
      node("td", { class: "drawn" }, bar(row, whole_s)),
      node("td", { class: "number" }, seconds(row.to_s - row.from_s)),
      node("td", { class: "reason spare" }, [row.failed, ...row.marks.map(([at_s, words]) => `${words} at ${seconds(at_s)}`)].filter(Boolean).join("; ")));
    const heads = ["stage", "worker", `0 to ${seconds(whole_s)}`, "took", ""].map((name, place) => node("th", { class: place === 3 ? "number" : place === 4 ? "spare" : "" }, name));
    return [node("div", { class: "wide" }, node("table", { class: "stages" }, node("thead", {}, node("tr", {}, ...heads)), node("tbody", {}, ...found.map(line))))];
  }

  return { rows, stages };
})();
