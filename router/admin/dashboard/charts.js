// Charts of the last hour as SVG. A chart can be focused: the arrow keys, and the pointer, read its values.
const Charts = (() => {
  const { node, svg, count, seconds } = Nodes;
  const WIDTH = 300, HEIGHT = 96, LEFT = 4, TOP = 14, BOTTOM = 14, HOUR_S = 3600;
  const percent = (part) => `${Math.round(100 * part)} %`;
  const rate = (number) => (number >= 100 ? count(number) : number.toFixed(1));

  // [title, figure in words, lines of a point: {name: value or null}, greatest value of the axis if it is fixed]
  const CHARTS = [
    ["TTFT", seconds, (one) => ({ p50: one.ttft_p50_s, p95: one.ttft_p95_s })],
    ["TPOT", seconds, (one) => ({ p50: one.tpot_p50_s, p95: one.tpot_p95_s })],
    ["Tokens/s", rate, (one) => ({ output: one.output_tokens_per_s, prompt: one.prompt_tokens_per_s })],
    ["Queue", count, (one) => ({ gateway: one.waiting, workers: one.worker_waiting, "in flight": one.in_flight })],
    ["KV in use", percent, (one) => one.kv_use, 1],
    ["Prompt tokens cached", percent, (one) => ({ cached: one.hit_rate }), 1],
  ];

  const clock = (at) => new Date(1000 * at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

  // The next 1, 2 or 5 times a power of ten.
  function ceiling(value) {
    if (!(value > 0)) return 1;
    const power = 10 ** Math.floor(Math.log10(value));
    return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= value * 0.999999);
  }

  // A line ends where nothing was measured; a single point is a dot, which a line of no length with round caps is.
  function path(points, name, of, x, y, period_s) {
    let drawn = "", before = null;
    for (const point of points) {
      const value = of(point)[name];
      if (value === null || value === undefined) continue;
      const place = `${x(point.at).toFixed(1)} ${y(value).toFixed(1)}`;
      drawn += before !== null && point.at - before <= 2 * period_s ? `L${place}` : `M${place}h0`;
      before = point.at;
    }
    return drawn;
  }

  function chart(spec, points, period_s, places) {
    const [title, figure, of, fixed] = spec, last = points.at(-1).at;
    const names = [...new Set(points.flatMap((one) => Object.keys(of(one))))];
    const values = points.flatMap((one) => Object.values(of(one))).filter((one) => one !== null && one !== undefined);
    const most = fixed ?? ceiling(Math.max(0, ...values));
    const x = (at) => LEFT + (WIDTH - 2 * LEFT) * (1 - (last - at) / HOUR_S);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.min(value, most) / most);
    const words = (point) => names.map((name) => {
      const value = of(point)[name];
      return `${name} ${value === null || value === undefined ? "-" : figure(value)}`;
    }).join(", ");
    const latest = [...points].reverse().find((one) => Object.values(of(one)).some((value) => value !== null && value !== undefined));
    const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, x1: 0, x2: 0, visibility: "hidden" });
    const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" },
      svg("line", { class: "rule", x1: LEFT, x2: WIDTH - LEFT, y1: y(most), y2: y(most) }),
      svg("line", { class: "rule", x1: LEFT, x2: WIDTH - LEFT, y1: y(0), y2: y(0) }),
      svg("text", { x: LEFT, y: TOP - 4 }, figure(most)),
      svg("text", { x: LEFT, y: HEIGHT - 2 }, clock(last - HOUR_S)),
      svg("text", { x: WIDTH - LEFT, y: HEIGHT - 2, "text-anchor": "end" }, clock(last)),
      ...names.map((name, number) => svg("path", { class: `line-${number}`, d: path(points, name, of, x, y, period_s) })),
      cursor);
    const said = node("span", { class: "said", "aria-live": "polite" });
    const keys = node("span", {}, ...names.map((name, number) => node("span", { class: `key key-${number}` }, name)));
    const made = node("figure", {
      class: "chart", tabindex: "0", role: "group", "data-chart": title,
      "aria-label": `${title} over the last hour. ${latest ? `Latest: ${words(latest)}` : "Nothing was measured"}. Arrow keys read it.`,
    }, node("figcaption", {}, node("strong", {}, title), " ", said), drawing, keys);

    function point(place) {
      places.set(title, place === null ? null : points[place].at);
      cursor.setAttribute("visibility", place === null ? "hidden" : "visible");
      if (place === null) return said.replaceChildren(latest ? words(latest) : "-");
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(points[place].at).toFixed(1));
      said.replaceChildren(`${clock(points[place].at)}: ${words(points[place])}`);
    }

    const at = () => points.findIndex((one) => one.at === places.get(title));
    made.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -points.length, End: points.length }[event.key];
      if (!steps) return;
      event.preventDefault();
      const from = at() === -1 ? (steps < 0 ? points.length : points.length - 1) : at();
      point(Math.min(points.length - 1, Math.max(0, from + steps)));
    });
    made.addEventListener("blur", () => made.isConnected && point(null));  // not if it is drawn again
    made.addEventListener("pointermove", (event) => {
      const box = drawing.getBoundingClientRect(), whole = points.map((one) => x(one.at) / WIDTH);
      const part = (event.clientX - box.left) / box.width;
      point(whole.reduce((best, one, place) => (Math.abs(one - part) < Math.abs(whole[best] - part) ? place : best), 0));
    });
    made.addEventListener("pointerleave", () => point(null));
    point(at() === -1 ? null : at());
    return made;
  }

  // `places` keeps, by chart, the moment that its cursor is at while new points come.
  function charts(points, period_s, places) {
    if (!points.length) return [node("p", { class: "dim" }, `The first ${period_s} seconds are being measured.`)];
    return CHARTS.map((spec) => chart(spec, points, period_s, places));
  }

  // The points of the last hour, with those that have come since in place of what was known of the same periods.
  function joined(points, news) {
    const first = news[0]?.at ?? Infinity, all = [...points.filter((one) => one.at < first), ...news];
    return all.filter((one) => one.at > all.at(-1).at - HOUR_S);
  }

  return { charts, joined };
})();
