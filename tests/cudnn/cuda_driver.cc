// A CUDA driver without a GPU, for the real cuDNN: it "loads" the kernels that cuDNN compiles when
// a plan is made, and refuses all else. Built as libcuda.so.1.
#define TRAINRT_REFUSED(name)                \
  int name() {                               \
    return 34; /* CUDA_ERROR_STUB_LIBRARY */ \
  }
#define TRAINRT_DONE(name) \
  int name() {             \
    return 0;              \
  }
#define TRAINRT_HANDLE(name) \
  int name(void** made) {    \
    static int something;    \
    *made = &something;      \
    return 0;                \
  }
#define TRAINRT_NUMBER(name, number) \
  int name(int* made) {              \
    *made = number;                  \
    return 0;                        \
  }

extern "C" {
TRAINRT_HANDLE(cuLibraryLoadData)
TRAINRT_HANDLE(cuLibraryGetKernel)
TRAINRT_HANDLE(cuLibraryGetModule)
TRAINRT_HANDLE(cuKernelGetFunction)
TRAINRT_HANDLE(cuModuleLoadData)
TRAINRT_HANDLE(cuModuleLoadDataEx)
TRAINRT_HANDLE(cuModuleGetFunction)
TRAINRT_NUMBER(cuKernelGetAttribute, 0)
TRAINRT_NUMBER(cuFuncGetAttribute, 0)
TRAINRT_NUMBER(cuOccupancyMaxActiveBlocksPerMultiprocessor, 1)
TRAINRT_DONE(cuLibraryUnload)
TRAINRT_DONE(cuModuleUnload)
TRAINRT_DONE(cuKernelSetAttribute)
TRAINRT_DONE(cuFuncSetAttribute)
TRAINRT_REFUSED(cuInit)
TRAINRT_REFUSED(cuDriverGetVersion)
TRAINRT_REFUSED(cuDeviceGet)
TRAINRT_REFUSED(cuDeviceGetCount)
TRAINRT_REFUSED(cuCtxGetCurrent)
TRAINRT_REFUSED(cuCtxGetDevice)
TRAINRT_REFUSED(cuCtxGetLimit)
TRAINRT_REFUSED(cuCtxPopCurrent)
TRAINRT_REFUSED(cuCtxPushCurrent)
TRAINRT_REFUSED(cuGetErrorName)
TRAINRT_REFUSED(cuGetErrorString)
TRAINRT_REFUSED(cuLaunchCooperativeKernel)
TRAINRT_REFUSED(cuLaunchKernel)
TRAINRT_REFUSED(cuLaunchKernelEx)
TRAINRT_REFUSED(cuLibraryLoadFromFile)
TRAINRT_REFUSED(cuLinkAddData)
TRAINRT_REFUSED(cuLinkComplete)
TRAINRT_REFUSED(cuLinkCreate)
TRAINRT_REFUSED(cuLinkDestroy)
TRAINRT_REFUSED(cuOccupancyMaxPotentialClusterSize)
TRAINRT_REFUSED(cuStreamGetCtx)
}
