// The lanes between workers as a map: who sends KV to whom, over what, how fast, and which lane is in trouble.
const LaneMap = (() => {
  const { node, svg, bytes } = Nodes;
  const ROW = 34, BOX = 24, MOST = 24, BAD = ["stuck", "lost", "corrupt"];

  // One line for both ends of a lane: {from, to, transport, state, num_bytes, busy_s, reason}. The end that has moved
  // more is shown; a lane in trouble at either end is.
  function links(lanes) {
    const found = new Map();
    for (const one of lanes) {
      const peer = one.peer.split("#")[0], [from, to] = [one.worker_id, peer].sort(), name = `${from} ${to}`;
      const known = found.get(name), mine = { ...one, from, to };
      if (!known || (mine.state !== "open" && known.state === "open") || (mine.state === known.state && mine.num_bytes > known.num_bytes)) found.set(name, mine);
    }
    return [...found.values()];
  }

  const speed = (one) => (one.busy_s ? `${bytes(one.num_bytes / one.busy_s)}/s` : "not used yet");
  const words = (one) => `${one.from} to ${one.to} over ${one.transport}: ${one.state === "open" ? `${bytes(one.num_bytes)} moved, ${speed(one)}` : one.state}${one.reason ? ` (${one.reason})` : ""}`;

  // Prefill workers on the left, the others on the right. Two workers of one side are joined by a bow.
  function map(workers, lanes) {
    const sides = [workers.filter((one) => one.info?.role === "prefill"), workers.filter((one) => one.info?.role !== "prefill")];
    const height = ROW * Math.max(...sides.map((one) => one.length)), places = new Map(), all = links(lanes);
    if (!all.length || sides.some((one) => one.length > MOST)) return [];
    for (const [side, members] of sides.entries()) {
      members.forEach((one, row) => places.set(one.worker_id, { side, y: (height * (row + 0.5)) / members.length }));
    }
    const most = Math.max(1, ...all.map((one) => one.num_bytes)), said = node("p", { class: "dim said", "aria-live": "polite" }, "Point at a lane, or reach it by Tab, to read it.");
    const drawn = all.filter((one) => places.has(one.from) && places.has(one.to)).map((one) => {
      const [a, b] = [one.from, one.to].map((name) => places.get(name)), x = (place) => (place.side ? 250 : 110);
      const bow = a.side !== b.side ? 180 : a.side ? 205 : 155;
      const line = svg("path", {
        class: `lane lane-${BAD.includes(one.state) ? "bad" : one.state === "open" ? "open" : "warn"}`, tabindex: "0", role: "img", "aria-label": words(one),
        d: `M${x(a)} ${a.y}C${bow} ${a.y} ${bow} ${b.y} ${x(b)} ${b.y}`, "stroke-width": (1.5 + 5 * Math.sqrt(one.num_bytes / most)).toFixed(1),
      }, svg("title", {}, words(one)));
      for (const event of ["focus", "pointerenter"]) line.addEventListener(event, () => { said.textContent = words(one); });
      return line;
    });
    const boxes = workers.filter((one) => places.has(one.worker_id)).map((one) => {
      const { side, y } = places.get(one.worker_id), name = one.worker_id.length > 14 ? `${one.worker_id.slice(0, 13)}…` : one.worker_id;
      return svg("g", { class: one.state === "ready" ? "box" : "box away" },
        svg("rect", { x: side ? 250 : 10, y: y - BOX / 2, width: 100, height: BOX, rx: 4 }), svg("text", { x: side ? 300 : 60, y: y + 4, "text-anchor": "middle" }, name, svg("title", {}, one.worker_id)));
    });
    return [svg("svg", { class: "lane-map", viewBox: `0 0 360 ${height}`, role: "group", "aria-label": "Lanes between workers" }, ...drawn, ...boxes), said];
  }

  return { map, links };
})();
