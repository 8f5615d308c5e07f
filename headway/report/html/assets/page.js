"use strict";
// The theme's switch, and what tells that a table goes on beyond the window.
(() => {
  const button = document.getElementById("theme");
  const name = () => { button.textContent = `Theme: ${theme.name()}`; };
  button.addEventListener("click", () => { theme.next(); name(); });
  name();
  const boxes = document.querySelectorAll(".scroll");
  const check = (box) => {
    const more = box.scrollLeft + box.clientWidth < box.scrollWidth - 2;
    box.classList.toggle("more", more);
    const before = box.previousElementSibling;
    const hint = before?.className === "hint" ? before : null;
    if (more && !hint && box.scrollLeft === 0) {
      const text = document.createElement("p");
      text.className = "hint";
      text.textContent = "The table goes on to the right: scroll \u2192";
      box.before(text);
    } else if (!more && hint) hint.remove();
  };
  const checkAll = () => boxes.forEach(check);
  boxes.forEach((box) => box.addEventListener("scroll", () => check(box), { passive: true }));
  document.addEventListener("toggle", checkAll, true);
  addEventListener("resize", checkAll);
  checkAll();
})();
