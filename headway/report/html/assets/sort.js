"use strict";
// Sorts a table by the column whose head is clicked; a second click turns it round.
document.addEventListener("click", ({ target }) => {
  const head = target.closest("table.sorts thead th");
  if (!head) return;
  const [body] = head.closest("table").tBodies;
  const value = (row, k) => row.cells[k].dataset.sort ?? row.cells[k].textContent;
  const down = head.ariaSort === "ascending";
  for (const other of head.parentNode.cells) other.ariaSort = null;
  head.ariaSort = down ? "descending" : "ascending";
  const k = head.cellIndex;
  const order = (a, b) => {
    const [left, right] = [value(a, k), value(b, k)];
    if (left === "" || right === "") return (left === "") - (right === "");
    const numbers = Number(left) - Number(right);
    const found = Number.isNaN(numbers) ? left.localeCompare(right) : numbers;
    return down ? -found : found;
  };
  body.append(...[...body.rows].sort(order));
});
