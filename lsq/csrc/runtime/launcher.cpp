#include "launcher.h"

namespace lsq {

void LaunchList::add(const std::string& what, const Launch& launch) {
    entries_.push_back({what, false, launches_.size()});
    launches_.push_back(launch);
}

void LaunchList::add(const std::string& what, const ProductCall& call) {
    entries_.push_back({what, true, products_.size()});
    products_.push_back(call);
}

int LaunchList::start(const Entry& entry, void* stream, const Workspace& workspace) {
    if (entry.is_product) {
        const ProductCall& call = products_[entry.index];
        const void* alpha = call.alphas ? *call.alphas : &call.alpha;
        return call.product->run(*call.a, *call.b, *call.out, alpha, workspace.memory,
                                 workspace.bytes, stream);
    }
    Launch& l = launches_[entry.index];
    return driver_.launch(l.function, l.grid[0], l.grid[1], l.grid[2], l.block[0], l.block[1],
                          l.block[2], l.shared_bytes, stream, l.parameters.data(), nullptr);
}

int LaunchList::run(void* stream, const Workspace& workspace, std::string& message) {
    const Current current(driver_);
    if (current.status()) {
        message = driver_.explain_context(current.status());
        return current.status();
    }
    for (const Shift& shift : shifts_) *shift.to = *shift.from + shift.offset;
    for (size_t i = 0; i < entries_.size(); ++i) {
        if (const int status = start(entries_[i], stream, workspace)) {
            message = explain(i, status);
            return status;
        }
    }
    return 0;
}

std::string LaunchList::explain(size_t entry, int status) const {
    const Entry& failed = entries_[entry];
    std::string text =
        "entry " + std::to_string(entry + 1) + " of " + std::to_string(entries_.size());
    text += ", " + failed.what;
    if (failed.is_product) return text + ": " + products_[failed.index].product->explain(status);
    const Launch& l = launches_[failed.index];
    const auto sizes = [](const std::array<unsigned, 3>& size) {
        return "(" + std::to_string(size[0]) + ", " + std::to_string(size[1]) + ", " +
               std::to_string(size[2]) + ")";
    };
    return text + ", grid " + sizes(l.grid) + ", block " + sizes(l.block) + ", " +
           std::to_string(l.shared_bytes) +
           " bytes of dynamic shared memory: " + driver_.explain(status);
}

}  // namespace lsq
