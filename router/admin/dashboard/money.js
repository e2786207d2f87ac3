// What tenants used, what is charged for it, and what it cost: columns of the ledger's sums over a day.
const Money = (() => {
  const { count } = Nodes;
  const usd = (value) => (value ? `$${value < 1 ? value.toPrecision(2) : value.toFixed(2)}` : "$0");

  const columns = (report) => [
    ["tenant", "word", (one) => Object.values(one.group).join(", ") || "without a name"],
    ["requests", "number", (one) => count(one.requests)],
    ["computed", "number spare", (one) => count(one.input_tokens)],
    ["cached", "number spare", (one) => count(one.cached_tokens)],
    ["output", "number spare", (one) => count(one.output_tokens)],
    ["charged", "number", (one) => usd(one.charged_usd)],
    ["cost", "number", (one) => (report.device_hour_usd ? usd(one.cost_usd) : "-")],
  ];

  // "" without a price of devices: nothing is known of costs then.
  const idle = (report) => (report.device_hour_usd ? `The devices cost ${usd(report.fleet_usd)}; ${usd(report.idle_usd)} of that was idle.` : "");

  return { columns, idle };
})();
