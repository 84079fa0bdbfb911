#include "cross_entropy_launch.h"

namespace lossguard::cuda {
LOSSGUARD_INSTANTIATE_CE(BFloat16)
}
